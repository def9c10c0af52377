/**
 * Attention rows from a payload's tensors: the probabilities of one query of one head over all tokens of the grid.
 *
 *     positions   P = softmax over keys k of table[k - q], or of -1/2 (k - q - c)^T A (k - q - c) for Gaussian heads
 *     content     P = softmax of query_q . key_k  (+ table[k - q], or row_scores[q, k_row] + column_scores[q, k_column])
 *     rows        P as stored
 *
 * Between two snapshots, scores of shifts are interpolated linearly, and therefore so are A and A c.
 *
 * `write...` functions fill an array of the caller, so that moving the pointer allocates no memory. Scores and
 * probabilities are float64.
 */
import type { Gaussian } from "./contours";
import { gaussianAt } from "./gaussians";
import type { Layer, Payload } from "./payload";
import type { Tensor } from "./safetensors";

export const PARTS = ["both", "content", "position"] as const;
export type Part = (typeof PARTS)[number];

/** Identifies a row. */
export interface Place {
  readonly layer: number;
  readonly head: number;
  /** Row-major index of the token in the grid, without prefix tokens. */
  readonly query: number;
  readonly image: number;
  /** Index of a snapshot, or a number between two indices. */
  readonly time: number;
}

/** Return the parts of a layer's scores; only "both" if they are not separate. */
export function partsOf(payload: Payload, layer: number): readonly Part[] {
  const kind = payload.manifest.layers[layer]?.kind;
  const positions = ["shift_scores", "row_scores"].some((name) => payload.of(layer, name) !== null);
  return kind === "content" && positions ? PARTS : ["both"];
}

/** Return the queries with stored rows; null if all queries have rows. */
export function storedQueries(payload: Payload, layer: number): ArrayLike<number> | null {
  return payload.manifest.layers[layer]?.kind === "rows" ? (payload.of(layer, "queries")?.data ?? null) : null;
}

/** Fill `into` (T) with scores before the softmax; return false for kind rows, which has no scores. */
export function writeScores(payload: Payload, place: Place, part: Part, into: Float64Array): boolean {
  const layer = payload.manifest.layers[place.layer];
  if (layer === undefined || layer.kind === "rows") return false;
  into.fill(0);
  if (layer.kind === "content" && part !== "position") addContent(payload, layer, place, into);
  if (layer.kind === "positions" || part !== "content") addPosition(payload, layer, place, into);
  return true;
}

/** Fill `into` (T) with probabilities that sum to 1; return false if the payload does not contain this query's row. */
export function writeRow(payload: Payload, place: Place, part: Part, into: Float64Array): boolean {
  if (!writeScores(payload, place, part, into)) return writeStored(payload, place, into);
  softmax(into);
  return true;
}

/** Compute the softmax in place, after subtracting the largest score. */
export function softmax(scores: Float64Array): void {
  let most = -Infinity;
  for (let key = 0; key < scores.length; key++) if (scores[key]! > most) most = scores[key]!;
  let total = 0;
  for (let key = 0; key < scores.length; key++) total += scores[key] = Math.exp(scores[key]! - most);
  for (let key = 0; key < scores.length; key++) scores[key]! /= total;
}

function addContent(payload: Payload, layer: Layer, place: Place, into: Float64Array): void {
  const queries = payload.of(place.layer, "query");
  const keys = payload.of(place.layer, "key");
  if (queries === null || keys === null) return;
  const tokens = into.length;
  const [left, right] = [queries.data, keys.data];
  const extent = queries.shape[3] ?? 0;
  const block = (place.image * layer.heads + place.head) * tokens * extent;
  const from = block + place.query * extent;
  for (let key = 0; key < tokens; key++) {
    let [sum, other] = [0, 0]; // two independent sums, which the processor computes in parallel
    const at = block + key * extent;
    for (let c = 1; c < extent; c += 2) {
      sum += left[from + c - 1]! * right[at + c - 1]!;
      other += left[from + c]! * right[at + c]!;
    }
    if (extent % 2 === 1) sum += left[from + extent - 1]! * right[at + extent - 1]!;
    into[key]! += sum + other;
  }
}

function addPosition(payload: Payload, layer: Layer, place: Place, into: Float64Array): void {
  const table = payload.of(place.layer, "shift_scores");
  const gaussian = table === null ? gaussianAt(payload, place.layer, place.head, place.time) : null;
  if (gaussian !== null) addGaussian(gaussian, layer, place.query, into);
  if (table !== null) {
    const before = Math.floor(place.time);
    const share = place.time - before;
    addTable(table, layer, place, before, 1 - share, into);
    if (share > 0) addTable(table, layer, place, before + 1, share, into);
  }
  const rows = payload.of(place.layer, "row_scores");
  const columns = payload.of(place.layer, "column_scores");
  if (rows === null || columns === null) return;
  const [height, width] = layer.sizes;
  const query = (place.image * layer.heads + place.head) * height * width + place.query;
  for (let row = 0; row < height; row++) {
    const score = rows.data[query * height + row]!;
    for (let column = 0; column < width; column++) {
      into[row * width + column]! += score + columns.data[query * width + column]!;
    }
  }
}

/** Add the part of a snapshot's shift table that a query uses, times a weight. */
function addTable(table: Tensor, layer: Layer, { head, query }: Place, snapshot: number, weight: number, into: Float64Array): void {
  const [height, width] = layer.sizes;
  const across = 2 * width - 1;
  const start = (snapshot * layer.heads + head) * (2 * height - 1) * across;
  const queryRow = Math.floor(query / width);
  const queryColumn = query % width;
  for (let row = 0; row < height; row++) {
    const from = start + (row - queryRow + height - 1) * across + (width - 1 - queryColumn);
    for (let column = 0; column < width; column++) into[row * width + column]! += weight * table.data[from + column]!;
  }
}

/** Add the scores of a Gaussian head. */
function addGaussian({ centre, precision }: Gaussian, { sizes: [height, width] }: Layer, query: number, into: Float64Array): void {
  const top = Math.floor(query / width) + centre[0];
  const left = (query % width) + centre[1];
  const rows = -0.5 * precision[0]!;
  const both = -0.5 * (precision[1]! + precision[2]!);
  const columns = -0.5 * precision[3]!;
  for (let row = 0; row < height; row++) {
    const down = row - top;
    for (let column = 0; column < width; column++) {
      const right = column - left;
      into[row * width + column]! += rows * down * down + (both * down + columns * right) * right;
    }
  }
}

function writeStored(payload: Payload, place: Place, into: Float64Array): boolean {
  const layer = payload.manifest.layers[place.layer];
  const queries = payload.of(place.layer, "queries");
  const stored = payload.of(place.layer, "probabilities");
  if (layer === undefined || queries === null || stored === null) return false;
  const index = Array.prototype.indexOf.call(queries.data, place.query);
  if (index < 0) return false;
  const start = ((place.image * layer.heads + place.head) * queries.data.length + index) * into.length;
  for (let key = 0; key < into.length; key++) into[key] = stored.data[start + key]!;
  return true;
}

/** Fill `into` with the mean of a query's rows over all images (the same for every image for kind positions). */
export function writeMeanRow(payload: Payload, place: Place, part: Part, into: Float64Array): boolean {
  const images = Math.max(payload.manifest.images.length, 1);
  if (payload.manifest.layers[place.layer]?.kind === "positions") return writeRow(payload, place, part, into);
  const one = new Float64Array(into.length);
  into.fill(0);
  for (let image = 0; image < images; image++) {
    if (!writeRow(payload, { ...place, image }, part, one)) return false;
    for (let key = 0; key < into.length; key++) into[key]! += one[key]! / images;
  }
  return true;
}
