/**
 * Location of a map of probabilities: its mean, and the smallest sets of tokens that contain a given share of its mass.
 *
 *     S(share) = the most probable tokens, added until they reach the share;      p in S >= level > p outside
 *
 * For a Gaussian head, p = exp(-1/2 (d - c)^T A (d - c)) / Z, so the tokens of S are those inside an ellipse: the level
 * set between the last token of S and the first one outside. For other heads the outline of the tokens is drawn.
 */
export interface Ellipse {
  /** (row, column) of its centre. */
  readonly centre: readonly [number, number];
  /** Semi-axes in tokens, the longer one first. */
  readonly axes: readonly [number, number];
  /** Angle of the longer axis in radians, from the direction of increasing columns towards increasing rows. */
  readonly angle: number;
}

/** Compute the mean position (row, column) of a map; null if its mass is 0. */
export function meanOf(map: Float64Array, width: number): [number, number] | null {
  let [mass, down, right] = [0, 0, 0];
  for (let key = 0; key < map.length; key++) {
    mass += map[key]!;
    down += map[key]! * Math.floor(key / width);
    right += map[key]! * (key % width);
  }
  return mass > 0 ? [down / mass, right / mass] : null;
}

let kept = new Float64Array(0);

/** Return the lowest probability in the smallest set of tokens with `share` of the mass. */
export function levelOf(map: Float64Array, share: number): number {
  // Tokens below (1 - share) / T have less than 1 - share in total, so the set is among the others.
  if (kept.length < map.length) kept = new Float64Array(map.length);
  let total = 0;
  for (let key = 0; key < map.length; key++) total += map[key]!;
  const least = ((1 - share) * total) / map.length;
  let count = 0;
  for (let key = 0; key < map.length; key++) if (map[key]! >= least) kept[count++] = map[key]!;
  const sorted = kept.subarray(0, count).sort();
  let held = 0;
  for (let index = count - 1; index >= 0; index--) {
    held += sorted[index]!;
    if (held >= share * total) return sorted[index]!;
  }
  return 0;
}

/** Return the ellipse (d - c)^T A (d - c) = radius^2 for a symmetric A, rows first; null if A is not positive definite. */
export function ellipse(centre: readonly [number, number], precision: ArrayLike<number>, radius: number): Ellipse | null {
  const [a, d] = [precision[0]!, precision[3]!];
  const b = (precision[1]! + precision[2]!) / 2;
  const middle = (a + d) / 2;
  const off = Math.hypot((a - d) / 2, b);
  const least = (a * d - b * b) / (middle + off); // the smaller eigenvalue, without cancellation
  if (!(least > 0)) return null;
  // The longer axis is the eigenvector of the smaller eigenvalue; the angle is zero along the columns (the second axis).
  const angle = 0.5 * Math.atan2(-2 * b, a - d);
  return { centre, axes: [radius / Math.sqrt(least), radius / Math.sqrt(middle + off)], angle };
}

export interface Gaussian {
  /** (row, column) on the map; may be outside it. */
  readonly centre: readonly [number, number];
  /** A, row-major. */
  readonly precision: ArrayLike<number>;
}

/** Return a Gaussian head's ellipse, halfway between the last token at or above `level` and the first token below it. */
export function gaussianContour(map: Float64Array, width: number, level: number, head: Gaussian): Ellipse | null {
  const [a, b, c, d] = [0, 1, 2, 3].map((at) => head.precision[at]!) as [number, number, number, number];
  let [last, next] = [0, Infinity];
  for (let key = 0, row = 0; key < map.length; row++) {
    const down = row - head.centre[0];
    for (let column = 0; column < width; column++, key++) {
      const right = column - head.centre[1];
      const squared = a * down * down + (b + c) * down * right + d * right * right;
      if (map[key]! < level) {
        if (squared < next) next = squared;
      } else if (squared > last) last = squared;
    }
  }
  return ellipse(head.centre, head.precision, Math.sqrt(next < Infinity ? (last + next) / 2 : last));
}

let mask = new Uint8Array(0);

/** Return 1 for tokens at or above `level`, with a border of zeros. The array is reused by the next call. */
function maskOf(map: Float64Array, width: number, level: number): Uint8Array {
  const [height, across] = [map.length / width, width + 2];
  if (mask.length === (height + 2) * across) mask.fill(0); // a map of a different shape has its border elsewhere
  else mask = new Uint8Array((height + 2) * across);
  for (let row = 0, key = 0; row < height; row++) {
    for (let column = 0, at = (row + 1) * across + 1; column < width; column++, key++, at++) mask[at] = map[key]! >= level ? 1 : 0;
  }
  return mask;
}

/** Call `line` for each straight segment of the outline of the tokens at or above `level`, from corner to corner. */
export function outline(
  map: Float64Array,
  width: number,
  level: number,
  line: (row: number, column: number, toRow: number, toColumn: number) => void,
): void {
  const height = map.length / width;
  const across = width + 2;
  const inside = maskOf(map, width, level); // token (row, column) is at [(row + 1) * across + column + 1]
  for (let row = 0; row <= height; row++) {
    let from = -1; // start of the current segment; -1 if there is none
    for (let column = 0; column <= width; column++) {
      const at = row * across + column + 1;
      const edge = inside[at] !== inside[at + across];
      if (edge && from < 0) from = column;
      else if (!edge && from >= 0) (line(row, from, row, column), (from = -1));
    }
  }
  for (let column = 0; column <= width; column++) {
    let from = -1;
    for (let row = 0; row <= height; row++) {
      const at = (row + 1) * across + column;
      const edge = inside[at] !== inside[at + 1];
      if (edge && from < 0) from = row;
      else if (!edge && from >= 0) (line(from, column, row, column), (from = -1));
    }
  }
}
