/**
 * The heads of a layer in the plane of shifts from the query.
 *
 * Heads that use only positions have the same place for every query: the centre of a Gaussian, or the mean shift of the
 * query in the middle of the grid. Other heads have the mean shift of the current query's map.
 */
import { levelOf, meanOf, outline } from "../core/contours";
import { gaussianAt } from "../core/gaussians";
import { type Choice, type Maps, writeMap } from "../core/maps";
import type { Payload } from "../core/payload";
import { isFlat } from "./attentionScale";
import type { PlaneHead, Shift } from "./headPlane";

const SCORES: Choice = { part: "both", softmax: true, image: 0, mean: false, time: 0, prefix: -1 };
const MOST_NUMBERS = 4e6; // of the trails of a layer without Gaussians: more would take longer than a frame

const places = (count: number): readonly number[] => Array.from({ length: count }, (_, index) => index);

/** Return the centres of the heads over training, for heads that use only positions; empty without snapshots. */
export function trailsOf(payload: Payload, layer: number): readonly (readonly Shift[])[] {
  const { kind, heads, sizes } = payload.manifest.layers[layer]!;
  const times = payload.manifest.times.length;
  const gaussian = payload.of(layer, "centres") !== null;
  if (kind !== "positions" || times < 2 || (!gaussian && times * heads * sizes[0] * sizes[1] > MOST_NUMBERS)) return [];
  const centre = (head: number, time: number): Shift | null =>
    gaussian ? gaussianAt(payload, layer, head, time)!.centre : middleOf(payload, layer, head, time).centre;
  return places(heads).map((head) => places(times).map((time) => centre(head, time)).filter((shift) => shift !== null));
}

/** Return the heads at a time of training; null if their places depend on the query. */
export function fixedPlane(payload: Payload, layer: number, time: number, trails: readonly (readonly Shift[])[]): PlaneHead[] | null {
  const { kind, heads } = payload.manifest.layers[layer]!;
  if (kind !== "positions") return null;
  return places(heads).map((head) => {
    const trail = trails[head] ?? [];
    const found = gaussianAt(payload, layer, head, time);
    return found ? { head, ...found, trail } : { head, ...middleOf(payload, layer, head, time), trail };
  });
}

/** Return a head's mean shift and contours for the query in the middle of the grid. */
function middleOf(payload: Payload, layer: number, head: number, time: number): Around {
  const [height, width] = payload.manifest.layers[layer]!.sizes;
  const map = new Float64Array(height * width);
  const query = [Math.floor(height / 2), Math.floor(width / 2)] as const;
  writeMap(payload, { layer, head, query: query[0] * width + query[1] }, { ...SCORES, time }, map);
  return around(map, width, query);
}

/** Return the heads of the current maps, which must be probabilities. */
export function livePlane(maps: Maps, width: number): PlaneHead[] {
  const query = [Math.floor(maps.query / width), maps.query % width] as const;
  return maps.heads.map((map, head) => ({ head, ...around(map, width, query) }));
}

type Around = Required<Pick<PlaneHead, "centre" | "outlines" | "flat">>;

function around(map: Float64Array, width: number, query: Shift): Around {
  const mean = meanOf(map, width);
  const corner = [query[0] + 0.5, query[1] + 0.5] as const; // the query's centre, from the corner of the grid
  const path = (share: number): string => outlinePath(map, width, levelOf(map, share), corner);
  return {
    centre: mean && [mean[0] - query[0], mean[1] - query[1]],
    outlines: () => ({ half: path(0.5), most: path(0.9) }),
    flat: isFlat(map),
  };
}

/** Return the SVG path of the outline of the tokens at or above `level`, relative to (row, column) from the corner of the grid. */
export function outlinePath(map: Float64Array, width: number, level: number, [down, right]: Shift): string {
  let path = "";
  outline(map, width, level, (row, column, toRow, toColumn) => {
    path += `M${column - right} ${row - down}L${toColumn - right} ${toRow - down}`;
  });
  return path;
}
