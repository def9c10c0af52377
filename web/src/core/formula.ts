/**
 * The terms of one score and one probability, for a query and a key of a head.
 *
 *     score = -1/2 (d - c)^T P (d - c) or a table entry,  + query . key,  + row score + column score
 *     p     = exp(score - largest) / sum over keys of exp(score - largest)
 */
import { classMass } from "./classTokens";
import { gaussianAt } from "./gaussians";
import { type Choice, writeMap } from "./maps";
import type { Payload } from "./payload";
import { type Place, writeScores } from "./rows";

export interface GaussianTerm {
  readonly centre: readonly [number, number];
  /** P, row-major. */
  readonly precision: readonly number[];
  /** d - c, (rows, columns) in tokens. */
  readonly off: readonly [number, number];
  readonly score: number;
}

export interface ContentTerm {
  readonly query: readonly number[];
  readonly key: readonly number[];
  readonly score: number;
}

export interface Formula {
  /** Key minus query, (rows, columns). */
  readonly shift: readonly [number, number];
  readonly gaussian: GaussianTerm | null;
  /** The stored score of the shift, relative to the largest over all shifts; null if the payload has no table. */
  readonly table: number | null;
  readonly content: ContentTerm | null;
  /** Scores of the key's row and column. */
  readonly along: readonly [number, number] | null;
  /** The softmax; null if the probability itself is stored. */
  readonly softmax: { readonly score: number; readonly largest: number; readonly weight: number; readonly sum: number; readonly keys: number } | null;
  readonly probability: number;
  /** Probability of class tokens and padding before the row is renormalised; null if not stored. */
  readonly elsewhere: number | null;
}

/** Compute the terms of the probability of `key` for one image; null if the payload does not contain the query's row. */
export function formulaOf(payload: Payload, place: Place, { part, prefix }: Pick<Choice, "part" | "prefix">, key: number): Formula | null {
  const layer = payload.manifest.layers[place.layer]!;
  const [height, width] = layer.sizes;
  const row = new Float64Array(height * width);
  const at = (token: number): [number, number] => [Math.floor(token / width), token % width];
  const shift = at(key).map((to, axis) => to - at(place.query)[axis]!) as [number, number];
  const scored = prefix < 0 && writeScores(payload, place, part, row);
  const softmax = scored ? summed(row, key) : null;
  if (!writeMap(payload, place, { part, prefix, softmax: true, image: place.image, mean: false, time: place.time }, row)) return null;
  const position = scored && (layer.kind === "positions" || part !== "content");
  return {
    shift,
    gaussian: position ? gaussianTerm(payload, place, shift) : null,
    table: position ? tableTerm(payload, place, shift) : null,
    content: scored && layer.kind === "content" && part !== "position" ? contentTerm(payload, place, key) : null,
    along: position ? alongTerm(payload, place, at(key)) : null,
    softmax,
    probability: row[key]!,
    elsewhere: prefix < 0 ? elsewhereOf(payload, place) : classMass(payload, place, prefix),
  };
}

function summed(scores: Float64Array, key: number): NonNullable<Formula["softmax"]> {
  const largest = scores.reduce((most, score) => Math.max(most, score), -Infinity);
  const sum = scores.reduce((total, score) => total + Math.exp(score - largest), 0);
  return { score: scores[key]!, largest, weight: Math.exp(scores[key]! - largest), sum, keys: scores.length };
}

function gaussianTerm(payload: Payload, place: Place, shift: readonly [number, number]): GaussianTerm | null {
  const found = gaussianAt(payload, place.layer, place.head, place.time);
  if (found === null) return null;
  const { centre } = found;
  const precision = Array.from(found.precision);
  const off = [shift[0] - centre[0], shift[1] - centre[1]] as const;
  const [a, b, c, d] = precision as [number, number, number, number];
  return { centre, precision, off, score: -0.5 * (a * off[0] ** 2 + (b + c) * off[0] * off[1] + d * off[1] ** 2) };
}

function tableTerm(payload: Payload, place: Place, shift: readonly [number, number]): number | null {
  const table = payload.of(place.layer, "shift_scores");
  if (table === null) return null;
  const { heads, sizes } = payload.manifest.layers[place.layer]!;
  const [down, across] = [2 * sizes[0] - 1, 2 * sizes[1] - 1];
  const at = (snapshot: number): number => {
    const start = (snapshot * heads + place.head) * down * across;
    return table.data[start + (shift[0] + sizes[0] - 1) * across + shift[1] + sizes[1] - 1]!;
  };
  const share = place.time % 1;
  return share === 0 ? at(place.time) : (1 - share) * at(Math.floor(place.time)) + share * at(Math.ceil(place.time));
}

function contentTerm(payload: Payload, place: Place, key: number): ContentTerm | null {
  const queries = payload.of(place.layer, "query");
  const keys = payload.of(place.layer, "key");
  if (queries === null || keys === null) return null;
  const [, heads, tokens, extent] = queries.shape as [number, number, number, number];
  const block = (place.image * heads + place.head) * tokens;
  const query = Array.from(queries.data.subarray((block + place.query) * extent, (block + place.query + 1) * extent));
  const chosen = Array.from(keys.data.subarray((block + key) * extent, (block + key + 1) * extent));
  return { query, key: chosen, score: query.reduce((sum, value, channel) => sum + value * chosen[channel]!, 0) };
}

function alongTerm(payload: Payload, place: Place, key: readonly [number, number]): readonly [number, number] | null {
  const rows = payload.of(place.layer, "row_scores");
  const columns = payload.of(place.layer, "column_scores");
  if (rows === null || columns === null) return null;
  const { heads, sizes } = payload.manifest.layers[place.layer]!;
  const query = (place.image * heads + place.head) * sizes[0] * sizes[1] + place.query;
  return [rows.data[query * sizes[0] + key[0]]!, columns.data[query * sizes[1] + key[1]]!];
}

function elsewhereOf(payload: Payload, place: Place): number | null {
  const mass = payload.of(place.layer, "prefix_mass");
  const queries = payload.of(place.layer, "queries");
  if (mass === null || queries === null) return null;
  const index = Array.prototype.indexOf.call(queries.data, place.query);
  const { heads } = payload.manifest.layers[place.layer]!;
  return index < 0 ? null : mass.data[(place.image * heads + place.head) * queries.data.length + index]!;
}
