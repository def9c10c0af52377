/**
 * Maps of all heads of a layer for one query. Arrays are reused, since the page recomputes every head of a model in each
 * animation frame.
 *
 * Probabilities are the softmax of the chosen scores, or its mean over images. Scores only matter up to a constant per
 * row, so they are relative to uniform attention: s - log(mean over keys of exp(s)), which is log(p T) for one image.
 */
import type { Layer, Payload } from "./payload";
import { type Part, type Place, partsOf, softmax, storedQueries, writeScores, writeRow } from "./rows";
import { writeClassRow } from "./classTokens";

export interface Choice {
  readonly part: Part;
  readonly softmax: boolean;
  readonly image: number;
  /** Use the mean over all images; `image` is then ignored. */
  readonly mean: boolean;
  readonly time: number;
  /** Index of the class token or register that is the query; -1 if the query is a token of the image. */
  readonly prefix: number;
  /** Name of the image: of two models that are compared, the second may have it at another index. */
  readonly named?: string;
}

/** A head and a query token. */
export type HeadQuery = Omit<Place, "image" | "time">;

export interface Maps {
  /** heads x T, row-major. */
  readonly values: Float64Array;
  /** Views of `values`, one map per head. */
  readonly heads: readonly Float64Array[];
  readonly largest: Float64Array;
  /** The query of these maps: the requested token, or the nearest one with stored rows. */
  query: number;
  /** The reason why there are no maps; empty if there are. */
  lack: string;
}

export function emptyMaps(layer: Layer): Maps {
  const tokens = layer.sizes[0] * layer.sizes[1];
  const values = new Float64Array(layer.heads * tokens);
  const heads = Array.from({ length: layer.heads }, (_, head) => values.subarray(head * tokens, (head + 1) * tokens));
  return { values, heads, largest: new Float64Array(layer.heads), query: 0, lack: "" };
}

/** Return the rows and columns of the finest grid among a payload's layers; query positions refer to this grid. */
export function finest(payload: Payload): readonly [number, number] {
  const sizes = payload.manifest.layers.map((layer) => layer.sizes);
  return [Math.max(1, ...sizes.map(([rows]) => rows)), Math.max(1, ...sizes.map(([, columns]) => columns))];
}

/** Return the query on a grid: the requested position, or the middle. */
export function queryIn(wanted: readonly number[], grid: readonly number[]): [number, number] {
  const along = (axis: number): number => Math.min(wanted[axis] ?? Math.floor(grid[axis]! / 2), grid[axis]! - 1);
  return [along(0), along(1)];
}

/** Map a position to a grid of other sizes: the token that contains the position's centre. */
export function carried(place: readonly number[], from: readonly number[], to: readonly number[]): [number, number] {
  const along = (axis: number): number =>
    Math.min(to[axis]! - 1, Math.max(0, Math.floor(((place[axis]! + 0.5) / from[axis]!) * to[axis]!)));
  return [along(0), along(1)];
}

/** Whether any layer has separate content and position scores. */
export function hasParts(payload: Payload): boolean {
  return payload.manifest.layers.some((_, layer) => partsOf(payload, layer).length > 1);
}

/** Restrict a choice to the parts, images and snapshots of a payload. */
export function choiceFor(payload: Payload, wanted: Choice): Choice {
  const { images, times } = payload.manifest;
  const last = times.length - 1;
  const named = images[wanted.image]?.name === wanted.named ? -1 : images.findIndex(({ name }) => name === wanted.named);
  return {
    ...wanted,
    part: hasParts(payload) ? wanted.part : "both",
    image: named >= 0 ? named : Math.min(wanted.image, Math.max(0, images.length - 1)),
    mean: wanted.mean && images.length > 1,
    time: wanted.time < 0 ? last : Math.min(wanted.time, last),
  };
}

/** Return the reason why a layer cannot show a choice; empty if it can. */
export function lackOf(payload: Payload, layer: number, choice: Choice): string {
  const { kind, prefix } = payload.manifest.layers[layer]!;
  if (choice.prefix >= 0) {
    if (prefix <= choice.prefix) return "This layer has no such token";
    if (payload.of(layer, "class_rows") === null) return "The payload does not contain the attention of this layer's class tokens";
    if (!choice.softmax || choice.part !== "both") return "The payload contains only probabilities for class tokens, no scores";
    return "";
  }
  if (kind === "rows" && !choice.softmax) return "The payload contains only probabilities for this layer, no scores";
  if (kind === "rows" && choice.part !== "both") return "The payload does not separate content and position for this layer";
  if (kind === "positions" && choice.part === "content") return "This layer does not use content";
  if (kind === "content" && choice.part === "position" && partsOf(payload, layer).length === 1) {
    return "This layer has no separate position scores";
  }
  return "";
}

/** Return the stored query nearest to a token; the token itself if all are stored. */
export function nearestStored(payload: Payload, layer: number, token: number): number {
  const stored = storedQueries(payload, layer);
  if (stored === null) return token;
  const width = payload.manifest.layers[layer]!.sizes[1];
  let nearest = token;
  let least = Infinity;
  for (let index = 0; index < stored.length; index++) {
    const down = Math.floor(stored[index]! / width) - Math.floor(token / width);
    const right = (stored[index]! % width) - (token % width);
    const distance = down * down + right * right;
    if (distance < least) [nearest, least] = [stored[index]!, distance];
  }
  return nearest;
}

export const NOT_STORED = "The payload does not contain this query";

let scratch = new Float64Array(0);
/** Fill one map; return false if it is not in the payload. The choice must be valid for the layer. */
export function writeMap(payload: Payload, place: HeadQuery, choice: Choice, into: Float64Array): boolean {
  const kind = payload.manifest.layers[place.layer]!.kind;
  const known = (image: number, row: Float64Array): boolean => {
    const whole = { ...place, image, time: choice.time };
    if (choice.prefix >= 0) return writeClassRow(payload, whole, choice.prefix, row);
    return choice.softmax ? writeRow(payload, whole, choice.part, row) : writeScores(payload, whole, choice.part, row);
  };
  if (!choice.mean || (kind === "positions" && choice.prefix < 0)) {
    if (!known(choice.image, into)) return false;
  } else {
    if (scratch.length !== into.length) scratch = new Float64Array(into.length);
    const images = payload.manifest.images.length;
    into.fill(0);
    for (let image = 0; image < images; image++) {
      if (!known(image, scratch)) return false;
      for (let key = 0; key < into.length; key++) into[key]! += scratch[key]! / images;
    }
  }
  if (!choice.softmax) lessUniform(into);
  return true;
}

/** Fill the maps of all heads for the stored query nearest to `token`. */
export function fillMaps(maps: Maps, payload: Payload, layer: number, token: number, choice: Choice): void {
  maps.lack = lackOf(payload, layer, choice);
  maps.query = nearestStored(payload, layer, token);
  if (maps.lack) return;
  maps.heads.forEach((map, head) => {
    if (!writeMap(payload, { layer, head, query: maps.query }, choice, map)) maps.lack = NOT_STORED;
    maps.largest[head] = largestOf(map);
  });
}

function largestOf(map: Float64Array): number {
  let most = -Infinity;
  for (let key = 0; key < map.length; key++) if (map[key]! > most) most = map[key]!;
  return most;
}

/** Subtract the log of the mean of exp(scores). */
function lessUniform(scores: Float64Array): void {
  const most = largestOf(scores);
  let sum = 0;
  for (let key = 0; key < scores.length; key++) sum += Math.exp(scores[key]! - most);
  const uniform = most + Math.log(sum / scores.length);
  for (let key = 0; key < scores.length; key++) scores[key]! -= uniform;
}

/** Write the softmax of a map of scores to another array, for contours and centres. */
export function probabilities(scores: Float64Array, into: Float64Array): Float64Array {
  into.set(scores);
  softmax(into);
  return into;
}
