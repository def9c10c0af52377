/**
 * The maps of all heads of a layer for one query, in arrays that are filled anew and never made anew: the page does
 * this for every head of a model between two pictures of the screen.
 *
 * Probabilities are the softmax of the chosen scores, or their mean over images. Scores count up to a constant of the
 * row, so they are given less the largest of the map: at most 0.
 */
import type { Layer, Payload } from "./payload";
import { type Part, type Place, partsOf, softmax, storedQueries, writeScores, writeRow } from "./rows";

export interface Choice {
  readonly part: Part;
  readonly softmax: boolean;
  readonly image: number;
  /** The mean over all images; `image` is then without effect. */
  readonly mean: boolean;
  readonly time: number;
}

/** A head and the token that it looks from. */
export type HeadQuery = Omit<Place, "image" | "time">;

export interface Maps {
  /** heads x T, row-major. */
  readonly values: Float64Array;
  /** One map of the above for each head. */
  readonly heads: readonly Float64Array[];
  readonly least: Float64Array;
  readonly largest: Float64Array;
  /** The token whose rows these are: the wanted one, or the nearest that is stored. */
  query: number;
  /** Why there are no numbers, in words; empty where there are. */
  lack: string;
}

export function emptyMaps(layer: Layer): Maps {
  const tokens = layer.sizes[0] * layer.sizes[1];
  const values = new Float64Array(layer.heads * tokens);
  const heads = Array.from({ length: layer.heads }, (_, head) => values.subarray(head * tokens, (head + 1) * tokens));
  return { values, heads, least: new Float64Array(layer.heads), largest: new Float64Array(layer.heads), query: 0, lack: "" };
}

/** Rows and columns of the finest grid among a payload's layers: what queries are counted in. */
export function finest(payload: Payload): readonly [number, number] {
  const sizes = payload.manifest.layers.map((layer) => layer.sizes);
  return [Math.max(1, ...sizes.map(([rows]) => rows)), Math.max(1, ...sizes.map(([, columns]) => columns))];
}

/** The query on a grid: where it is wanted, or in the middle. */
export function queryIn(wanted: readonly number[], grid: readonly number[]): [number, number] {
  const along = (axis: number): number => Math.min(wanted[axis] ?? Math.floor(grid[axis]! / 2), grid[axis]! - 1);
  return [along(0), along(1)];
}

/** The place on a grid of other sizes that holds the middle of a place on a grid. */
export function carried(place: readonly number[], from: readonly number[], to: readonly number[]): [number, number] {
  const along = (axis: number): number =>
    Math.min(to[axis]! - 1, Math.max(0, Math.floor(((place[axis]! + 0.5) / from[axis]!) * to[axis]!)));
  return [along(0), along(1)];
}

/** Whether some layer lets one choose between content and position. */
export function hasParts(payload: Payload): boolean {
  return payload.manifest.layers.some((_, layer) => partsOf(payload, layer).length > 1);
}

/** The choice made legal for a payload: a part, an image and a moment that it has. */
export function choiceFor(payload: Payload, wanted: Choice): Choice {
  const { images, times } = payload.manifest;
  const last = times.length - 1;
  return {
    ...wanted,
    part: hasParts(payload) ? wanted.part : "both",
    image: Math.min(wanted.image, Math.max(0, images.length - 1)),
    mean: wanted.mean && images.length > 1,
    time: wanted.time < 0 ? last : Math.min(wanted.time, last),
  };
}

/** Why a layer cannot show a choice, in words; empty where it can. */
export function lackOf(payload: Payload, layer: number, choice: Choice): string {
  const { kind } = payload.manifest.layers[layer]!;
  if (kind === "rows" && !choice.softmax) return "Its scores are not stored";
  if (kind === "rows" && choice.part !== "both") return "Its parts are not stored";
  if (kind === "positions" && choice.part === "content") return "It does not look at content";
  if (kind === "content" && choice.part === "position" && partsOf(payload, layer).length === 1) {
    return "It has no part by position";
  }
  return "";
}

/** The stored query nearest to a token; the token itself where all are known. */
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

let scratch = new Float64Array(0);

/** Fills one map; false where the payload does not hold it. The choice must be legal, and lack nothing. */
export function writeMap(payload: Payload, place: HeadQuery, choice: Choice, into: Float64Array): boolean {
  const kind = payload.manifest.layers[place.layer]!.kind;
  const known = (image: number, row: Float64Array): boolean => {
    const whole = { ...place, image, time: choice.time };
    return choice.softmax ? writeRow(payload, whole, choice.part, row) : writeScores(payload, whole, choice.part, row);
  };
  if (!choice.mean || kind === "positions") {
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
  if (!choice.softmax) lessLargest(into);
  return true;
}

/** Fills the maps of all heads for the query nearest to `token`. */
export function fillMaps(maps: Maps, payload: Payload, layer: number, token: number, choice: Choice): void {
  maps.lack = lackOf(payload, layer, choice);
  maps.query = nearestStored(payload, layer, token);
  if (maps.lack) return;
  maps.heads.forEach((map, head) => {
    if (!writeMap(payload, { layer, head, query: maps.query }, choice, map)) maps.lack = "It is not stored";
    let [least, largest] = [Infinity, -Infinity];
    for (let key = 0; key < map.length; key++) {
      const value = map[key]!;
      if (value < least) least = value;
      if (value > largest) largest = value;
    }
    maps.least[head] = least;
    maps.largest[head] = largest;
  });
}

function lessLargest(scores: Float64Array): void {
  let most = -Infinity;
  for (let key = 0; key < scores.length; key++) if (scores[key]! > most) most = scores[key]!;
  for (let key = 0; key < scores.length; key++) scores[key]! -= most;
}

/** Probabilities of a map of scores, into another array: what contours and centres are of. */
export function probabilities(scores: Float64Array, into: Float64Array): Float64Array {
  into.set(scores);
  softmax(into);
  return into;
}
