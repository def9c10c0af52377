/**
 * Where a map of probabilities lies: its mean, and the smallest sets of pixels that hold a share of its mass.
 *
 *     S(share) = the most probable pixels, taken until they hold the share;      p in S >= level > p outside
 *
 * Of a Gaussian head p = exp(-1/2 (d - c)^T A (d - c)) / Z, so the pixels of S are those inside of an ellipse: the level
 * set between the last pixel of S and the first one outside. Of other heads the outline of the pixels is drawn.
 */
export interface Ellipse {
  /** (row, column) of its middle. */
  readonly centre: readonly [number, number];
  /** Half axes in pixels, the longer one first. */
  readonly axes: readonly [number, number];
  /** Angle of the longer axis from the direction of columns towards rows, in radians. */
  readonly angle: number;
}

/** Mean place (row, column) of a map's mass; null where it has none. */
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

/** The probability of the last pixel of the smallest set that holds `share` of the mass. */
export function levelOf(map: Float64Array, share: number): number {
  // Pixels below (1 - share) / T hold less than 1 - share together, so the set is among the others.
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

/** The ellipse (d - c)^T A (d - c) = radius^2 with A symmetric, rows first; null where A is not positive definite. */
export function ellipse(centre: readonly [number, number], precision: ArrayLike<number>, radius: number): Ellipse | null {
  const [a, d] = [precision[0]!, precision[3]!];
  const b = (precision[1]! + precision[2]!) / 2;
  const middle = (a + d) / 2;
  const off = Math.hypot((a - d) / 2, b);
  const least = (a * d - b * b) / (middle + off); // the small eigenvalue, without cancellation
  if (!(least > 0)) return null;
  // The longer axis is the eigenvector of the small eigenvalue; the angle is zero along columns (the second axis).
  const angle = 0.5 * Math.atan2(-2 * b, a - d);
  return { centre, axes: [radius / Math.sqrt(least), radius / Math.sqrt(middle + off)], angle };
}

export interface Gaussian {
  /** (row, column) on the map; may lie outside. */
  readonly centre: readonly [number, number];
  /** A, row-major. */
  readonly precision: ArrayLike<number>;
}

/** The ellipse of a Gaussian head that goes midway between the last pixel of at least `level` and the first one below. */
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

/** 1 for the pixels of at least `level`, with a frame of zeros around the map; good until the next one is made. */
function maskOf(map: Float64Array, width: number, level: number): Uint8Array {
  const [height, across] = [map.length / width, width + 2];
  if (mask.length === (height + 2) * across) mask.fill(0); // another shape may have its frame elsewhere
  else mask = new Uint8Array((height + 2) * across);
  for (let row = 0, key = 0; row < height; row++) {
    for (let column = 0, at = (row + 1) * across + 1; column < width; column++, key++, at++) mask[at] = map[key]! >= level ? 1 : 0;
  }
  return mask;
}

/** Gives `line` the outline of the pixels of at least `level`: straight runs of their edges, corner to corner. */
export function outline(
  map: Float64Array,
  width: number,
  level: number,
  line: (row: number, column: number, toRow: number, toColumn: number) => void,
): void {
  const height = map.length / width;
  const across = width + 2;
  const inside = maskOf(map, width, level); // of pixel (row, column) at [(row + 1) * across + column + 1]
  for (let row = 0; row <= height; row++) {
    let from = -1; // where the run began, or -1 beside a run
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
