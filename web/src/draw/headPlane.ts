/** Data and geometry of `HeadPlane`: heads in the plane of shifts from the query, (row, column) in tokens. */
import { ellipse } from "../core/contours";

export type Shift = readonly [number, number];

export interface PlaneHead {
  readonly head: number;
  /** Centre or mean shift; null if the head has none. */
  readonly centre: Shift | null;
  /** Precision matrix of a Gaussian head, row-major; its contours are ellipses. */
  readonly precision?: ArrayLike<number>;
  /** Return SVG paths of the contours of another head, in (column, row) of the plane; called if the head is highlighted. */
  readonly outlines?: () => { readonly half: string; readonly most: string };
  /** Centres over training. */
  readonly trail?: readonly Shift[];
  /** Whether the head is removed; it is drawn dashed. */
  readonly missing?: boolean;
  /** Whether the head attends almost uniformly, so that its mean shift says little. */
  readonly flat?: boolean;
}

/** Squared Mahalanobis radius that encloses a share of a Gaussian in the plane. */
const squared = (share: number): number => -2 * Math.log(1 - share);

/** Return the axes of the ellipse that contains a share of a Gaussian's mass, and its angle in degrees; null if it has none. */
export function gaussianEllipse(precision: ArrayLike<number>, share: number): { rx: number; ry: number; angle: number } | null {
  const found = ellipse([0, 0], precision, Math.sqrt(squared(share)));
  return found && { rx: found.axes[0], ry: found.axes[1], angle: (180 * found.angle) / Math.PI };
}

/** Return an SVG path through shifts; empty for fewer than two. */
export function trailPath(trail: readonly Shift[]): string {
  return trail.length < 2 ? "" : `M${trail.map(([row, column]) => `${column.toFixed(3)} ${row.toFixed(3)}`).join("L")}`;
}

/** Whether a head's attention is too wide to be seen in a plane: almost uniform, or with a contour of 50% outside the plane. */
export function isWide({ precision, flat = false }: PlaneHead, range: number): boolean {
  if (!precision) return flat;
  const half = gaussianEllipse(precision, 0.5);
  return half === null || half.ry > range;
}

/** Return places for discs, which are pushed apart until they are `least` apart: heads with the same centre stay visible. */
export function spread(centres: readonly (Shift | null)[], least: number): (Shift | null)[] {
  const places = centres.map((centre) => centre && ([centre[0], centre[1]] as [number, number]));
  for (let round = 0; round < 40; round++) {
    places.forEach((one, index) => {
      for (let before = 0; one && before < index; before++) {
        const other = places[before];
        if (!other) continue;
        const [down, right] = [one[0] - other[0], one[1] - other[1]];
        const apart = Math.hypot(down, right);
        if (apart >= least) continue;
        const angle = apart > 1e-3 * least ? Math.atan2(down, right) : index;
        const push = (least - apart) / 2;
        const by = [push * Math.sin(angle), push * Math.cos(angle)] as const;
        for (const axis of [0, 1] as const) (one[axis] += by[axis]), (other[axis] -= by[axis]);
      }
    });
  }
  return places;
}

/** Return the half width of a plane that shows all centres and trails, in tokens: `least` or more, at most `most`. */
export function rangeOf(heads: readonly PlaneHead[], least: number, most: number): number {
  let far = 0;
  for (const { centre, trail = [] } of heads) {
    for (const shift of centre === null ? trail : [centre, ...trail]) far = Math.max(far, Math.abs(shift[0]), Math.abs(shift[1]));
  }
  return Math.min(Math.max(Math.ceil(far) + 0.75, least), most);
}
