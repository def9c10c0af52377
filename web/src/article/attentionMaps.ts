/** Attention maps for the step on trained heads: from the payload, or a sketch if there is none. */
import type { Plane } from "../core/convolution";
import type { Geometry } from "../core/grid";
import type { Payload } from "../core/payload";
import { storedQueries, writeRow } from "../core/rows";
import { attentionOf } from "../core/theorem";

const MOST_LAYERS = 3;
const MOST_HEADS = 16;

export interface LayerMaps {
  readonly name: string;
  /** Number of heads of the layer; there may be fewer maps. */
  readonly heads: number;
  /** (row, column) of the nearest query with stored rows, on this layer's grid. */
  readonly query: readonly [number, number];
  readonly maps: readonly Plane[];
}

/** Return the maps of the payload's first layers, with the final weights, for a query on the first layer's grid. */
export function layerMaps(payload: Payload, query: readonly [number, number]): LayerMaps[] {
  const first = payload.manifest.layers[0]!.sizes;
  return payload.manifest.layers.slice(0, MOST_LAYERS).map((layer, number) => {
    const [height, width] = layer.sizes;
    const scaled = query.map((at, axis) => Math.floor(((at + 0.5) / first[axis]!) * layer.sizes[axis]!));
    const token = nearestStored(storedQueries(payload, number), scaled[0]! * width + scaled[1]!, width);
    const maps = Array.from({ length: Math.min(layer.heads, MOST_HEADS) }, (_, head) => {
      const data = new Float64Array(height * width);
      writeRow(payload, { layer: number, head, query: token, image: 0, time: payload.manifest.times.length - 1 }, "both", data);
      return { height, width, data };
    });
    return { name: layer.name, heads: layer.heads, query: [Math.floor(token / width), token % width], maps };
  });
}

/** Return the stored token nearest to `token` on a grid `width` wide; the token itself if all are stored. */
export function nearestStored(stored: ArrayLike<number> | null, token: number, width: number): number {
  if (stored === null || stored.length === 0) return token;
  const apart = (other: number): number =>
    (Math.floor(other / width) - Math.floor(token / width)) ** 2 + ((other % width) - (token % width)) ** 2;
  return Array.from(stored).reduce((best, other) => (apart(other) < apart(best) ? other : best), stored[0]!);
}

/** Return the payload's first image as mean grey levels of the first layer's tokens; NaN if it has no image. */
export function tokenGreys(payload: Payload): Plane {
  const [height, width] = payload.manifest.layers[0]!.sizes;
  const data = new Float64Array(height * width).fill(NaN);
  const images = payload.images;
  if (images === null) return { height, width, data };
  const [, high, wide] = images.shape as [number, number, number];
  for (let token = 0; token < data.length; token++) {
    const rows = span(Math.floor(token / width), height, high);
    const columns = span(token % width, width, wide);
    let sum = 0;
    for (let row = rows[0]; row < rows[1]; row++) {
      for (let column = columns[0]; column < columns[1]; column++) {
        const at = 3 * (row * wide + column);
        sum += 0.299 * images.data[at]! + 0.587 * images.data[at + 1]! + 0.114 * images.data[at + 2]!;
      }
    }
    data[token] = sum / 255 / ((rows[1] - rows[0]) * (columns[1] - columns[0]));
  }
  return { height, width, data };
}

/** Return the range of pixels in part `index` of `parts`, at least one pixel. */
function span(index: number, parts: number, pixels: number): [number, number] {
  const start = Math.min(Math.floor((index * pixels) / parts), pixels - 1);
  return [start, Math.max(start + 1, Math.floor(((index + 1) * pixels) / parts))];
}

export const SKETCH_SIZE = 13;
const GEOMETRY: Geometry = { width: 3, stride: 1, dilation: 1, border: "renormalise" };

/** Heads chosen by hand, as the paper describes them: sharp and close to the query in early layers, wider and farther away later. */
const SKETCHED = [
  { name: "an early layer", alpha: 2.5, far: 1 },
  { name: "a later layer", alpha: 0.35, far: 2.6 },
  { name: "a deep layer", alpha: 0.12, far: 3.6 },
];
const RING = [[-1, -1], [-1, 0.1], [-0.9, 1.1], [0.1, -1], [0, 0], [0, 0.9], [1.1, -0.9], [1, 0], [0.9, 1]] as const;

export function sketchedMaps(query: readonly [number, number]): LayerMaps[] {
  return SKETCHED.map(({ name, alpha, far }) => {
    const centres = RING.map(([row, column]): [number, number] => [far * row, far * column]);
    const heads = { alpha, centres, weights: [], present: [] };
    const maps = RING.map((_, head) => attentionOf([SKETCH_SIZE, SKETCH_SIZE], query, heads, head, GEOMETRY));
    return { name, heads: RING.length, query, maps };
  });
}
