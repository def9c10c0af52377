/** Heads for the step on trained heads: from the payload, or a sketch if there is none. */
import type { Plane } from "../core/convolution";
import type { Geometry } from "../core/grid";
import { type Choice, carried, emptyMaps, fillMaps } from "../core/maps";
import type { Payload } from "../core/payload";
import { type Photograph, withGreys } from "../core/photographs";
import { attentionOf } from "../core/theorem";
import { type PlaneHead, rangeOf } from "../draw/headPlane";
import { fixedPlane, livePlane, trailsOf } from "../draw/planes";

const MOST_LAYERS = 3;
const MOST_HEADS = 16;
const LEAST_RANGE = 2.75; // of a plane of heads, in tokens

export interface LayerMaps {
  readonly name: string;
  /** Number of heads of the layer; there may be fewer maps. */
  readonly heads: number;
  /** (row, column) of the nearest query with stored rows, on this layer's grid. */
  readonly query: readonly [number, number];
  readonly maps: readonly Plane[];
  /** The heads in the plane of shifts from the query, and the plane's half width in tokens. */
  readonly plane: readonly PlaneHead[];
  readonly range: number;
}

/** Return the heads of the payload's first layers, with the final weights, for a query on the first layer's grid. */
export function layerMaps(payload: Payload, query: readonly [number, number]): LayerMaps[] {
  const time = payload.manifest.times.length - 1;
  const choice: Choice = { part: "both", softmax: true, image: 0, mean: false, time, prefix: -1 };
  return payload.manifest.layers.slice(0, MOST_LAYERS).map((layer, number) => {
    const [height, width] = layer.sizes;
    const [row, column] = carried(query, payload.manifest.layers[0]!.sizes, layer.sizes);
    const maps = emptyMaps(layer);
    fillMaps(maps, payload, number, row * width + column, choice);
    const plane = fixedPlane(payload, number, time, trailsOf(payload, number)) ?? livePlane(maps, width);
    return {
      name: `layer ${number}`,
      heads: layer.heads,
      query: [Math.floor(maps.query / width), maps.query % width],
      maps: maps.heads.slice(0, MOST_HEADS).map((data) => ({ height, width, data })),
      plane,
      range: rangeOf(plane, LEAST_RANGE, Math.max(height, width)),
    };
  });
}

/** Return the payload's first image in its colours, or null. */
export function firstImage({ images }: Payload): Photograph | null {
  if (images === null) return null;
  const [, height, width] = images.shape as [number, number, number];
  const colours = Uint8ClampedArray.from({ length: 4 * height * width }, (_, at) => (at % 4 === 3 ? 255 : images.data[3 * (at >> 2) + (at % 4)]!));
  return withGreys(colours, height, width);
}

export const SKETCH_SIZE = 17;
const SKETCH_RANGE = 5.75; // the same for all layers, so that their heads can be compared
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
    const plane = centres.map((centre, head): PlaneHead => ({ head, centre, precision: [2 * alpha, 0, 0, 2 * alpha] }));
    return { name, heads: RING.length, query, maps, plane, range: SKETCH_RANGE };
  });
}
