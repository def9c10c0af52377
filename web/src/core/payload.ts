/** The payload: a manifest, validated field by field, and tensors, validated against the manifest. */
import { type Kind, type Safetensors, type Tensor, isRecord, readSafetensors } from "./safetensors";

export const KINDS = ["positions", "content", "rows"] as const;
export type LayerKind = (typeof KINDS)[number];

export interface Statistics {
  /** One number for each head, null where it does not apply. */
  readonly heads: Readonly<Record<string, readonly (number | null)[]>>;
  readonly layer: Readonly<Record<string, number | null>>;
}

export interface Layer {
  readonly name: string;
  readonly kind: LayerKind;
  readonly heads: number;
  /** Rows and columns of the token grid. */
  readonly sizes: readonly [number, number];
  /** Tokens before those of the grid (class tokens). */
  readonly prefix: number;
  readonly border: string;
  /** Rows and columns of the windows that attention is restricted to, in tokens; null if there are none. */
  readonly window: readonly [number, number] | null;
  readonly encoding: string;
  readonly dilated: boolean;
  readonly statistics: Statistics;
  /** Convolution score at each snapshot, null where it is unknown. */
  readonly scores: readonly (number | null)[];
}

export interface PayloadImage {
  readonly name: string;
  /** The image's class, null if it is unknown. */
  readonly label: string | null;
}

export interface Manifest {
  readonly title: string;
  readonly library: string;
  readonly patch: readonly [number, number] | null;
  readonly images: readonly PayloadImage[];
  readonly times: readonly string[];
  readonly layers: readonly Layer[];
  /** Whether the model's parameters are initial random values. */
  readonly random: boolean;
  /** Names of the model's classes, in the order of its logits; empty without logits. */
  readonly classes: readonly string[];
  /** Names of modules whose attention could not be read, each with the reason. */
  readonly leftOut: readonly (readonly [string, string])[];
}

export interface Payload {
  readonly manifest: Manifest;
  /** Return a tensor of a layer, such as `of(0, "query")`, or null if the payload has none. */
  of(layer: number, name: string): Tensor | null;
  /** The model's logits, (n, classes), or null. */
  readonly logits: Tensor | null;
  /** The images as displayed, uint8 (n, height, width, 3), or null. */
  readonly images: Tensor | null;
}

const FORMAT = 1;
/** Beyond these limits the maps would need more memory than a browser allows. */
const MOST_HEADS = 4096;
const MOST_NUMBERS = 4e6; // heads x tokens of a layer: the size of its maps for one query

/** Read and validate a payload. */
export function openPayload(bytes: ArrayBuffer): Payload {
  const file = readSafetensors(bytes);
  const text = file.metadata["attnconv"];
  if (text === undefined) fail("__metadata__", "must contain the key 'attnconv'", "a safetensors file from a different program");
  const manifest = manifestOf(text);
  checkTensors(file, manifest);
  return {
    manifest,
    of: (layer, name) => file.tensor(`${layer}.${name}`),
    logits: file.tensor("logits"),
    images: file.tensor("images"),
  };
}

function manifestOf(text: string): Manifest {
  let json: unknown;
  try {
    json = JSON.parse(text);
  } catch {
    fail("attnconv", "must be JSON", "something else");
  }
  const all = record(json, "manifest");
  if (all["format"] !== FORMAT) fail("format", `must be ${FORMAT}`, all["format"]);
  const times = list(all["times"], "times").map((entry, index) => string(entry, `times[${index}]`));
  if (times.length === 0) fail("times", "must name at least one snapshot", "none");
  const layers = list(all["layers"], "layers").map((entry, index) => layerOf(entry, `layers[${index}]`, times.length));
  if (layers.length === 0) fail("layers", "must name at least one layer", "none");
  return {
    title: string(all["title"], "title"),
    library: string(all["library"], "library"),
    patch: all["patch"] === null ? null : pair(all["patch"], "patch"),
    images: list(all["images"], "images").map((entry, index) => imageOf(entry, `images[${index}]`)),
    times,
    layers,
    random: boolean(all["random"] ?? false, "random"),
    classes: list(all["classes"] ?? [], "classes").map((entry, index) => string(entry, `classes[${index}]`)),
    leftOut: Object.entries(record(all["left_out"] ?? {}, "left_out")).map(([name, reason]) => [name, string(reason, `left_out.${name}`)]),
  };
}

function imageOf(value: unknown, path: string): PayloadImage {
  const all = record(value, path);
  return {
    name: string(all["name"], `${path}.name`),
    label: (all["label"] ?? null) === null ? null : string(all["label"], `${path}.label`),
  };
}

function layerOf(value: unknown, path: string, times: number): Layer {
  const all = record(value, path);
  const kind = KINDS.find((known) => known === all["kind"]);
  if (kind === undefined) fail(`${path}.kind`, `must be one of ${KINDS.join(", ")}`, all["kind"]);
  const heads = count(all["heads"], `${path}.heads`, 1);
  if (heads > MOST_HEADS) fail(`${path}.heads`, `must be at most ${MOST_HEADS}`, heads);
  const sizes = pair(all["sizes"], `${path}.sizes`);
  const numbers = heads * sizes[0] * sizes[1];
  if (numbers > MOST_NUMBERS) fail(`${path}.sizes`, `must have at most ${MOST_NUMBERS} heads x tokens`, numbers);
  const statistics = statisticsOf(all["statistics"], heads, `${path}.statistics`);
  return {
    name: string(all["name"], `${path}.name`),
    kind,
    heads,
    sizes,
    prefix: count(all["prefix"], `${path}.prefix`, 0),
    border: string(all["border"], `${path}.border`),
    window: (all["window"] ?? null) === null ? null : pair(all["window"], `${path}.window`),
    encoding: string(all["encoding"], `${path}.encoding`),
    dilated: all["dilated"] === true,
    statistics,
    scores: scoresOf(all["scores"], times, statistics.layer["score"] ?? null, `${path}.scores`),
  };
}

/** Return the convolution scores of all snapshots; older payloads contain only that of the last one. */
function scoresOf(value: unknown, times: number, last: number | null, path: string): readonly (number | null)[] {
  if ((value ?? null) === null) return Array.from({ length: times }, (_, time) => (time === times - 1 ? last : null));
  const scores = list(value, path).map((entry, time) => numberOrNull(entry, `${path}[${time}]`));
  return scores.length === times ? scores : fail(path, `must have ${times} entries, one per snapshot`, scores.length);
}

function statisticsOf(value: unknown, heads: number, path: string): Statistics {
  const all = record(value, path);
  const perHead = Object.entries(record(all["heads"], `${path}.heads`)).map(([name, entries]) => {
    const numbers = list(entries, `${path}.heads.${name}`).map((entry) => numberOrNull(entry, `${path}.heads.${name}`));
    if (numbers.length !== heads) fail(`${path}.heads.${name}`, `must have ${heads} entries`, numbers.length);
    return [name, numbers] as const;
  });
  const whole = Object.entries(record(all["layer"], `${path}.layer`)).map(
    ([name, entry]) => [name, numberOrNull(entry, `${path}.layer.${name}`)] as const,
  );
  return { heads: named(perHead), layer: named(whole) };
}

/** Build an object without a prototype: a statistic may be named `constructor`, which other layers must not inherit. */
function named<T>(entries: readonly (readonly [string, T])[]): Readonly<Record<string, T>> {
  return Object.assign(Object.create(null) as Record<string, T>, Object.fromEntries(entries));
}

/** Names of the element types in error messages. */
const TYPES: Readonly<Record<Kind, string>> = { U8: "uint8", I32: "int32", F16: "float16", F32: "float32", F64: "float64" };

/** Tensors that a layer may have: element type and shape. The manifest defines t, n, h, c, H, W, T and prefix; e and m are free. */
const FORMS: Readonly<Record<string, readonly [Kind, ...string[]]>> = {
  shift_scores: ["F32", "t", "h", "2H-1", "2W-1"],
  centres: ["F32", "t", "h", "2"],
  precision: ["F32", "t", "h", "2", "2"],
  query: ["F16", "n", "h", "T", "e"],
  key: ["F16", "n", "h", "T", "e"],
  row_scores: ["F16", "n", "h", "T", "H"],
  column_scores: ["F16", "n", "h", "T", "W"],
  queries: ["I32", "m"],
  probabilities: ["F16", "n", "h", "m", "T"],
  prefix_mass: ["F16", "n", "h", "m"],
  class_rows: ["F16", "n", "h", "prefix", "T"],
  class_mass: ["F16", "n", "h", "prefix"],
  zero_logits: ["F16", "n", "h", "c"],
  convolution_logits: ["F16", "n", "h", "c"],
};
const NEEDED: Readonly<Record<LayerKind, readonly string[]>> = {
  positions: [], // a table of shifts, or the centres and precision matrices of Gaussian heads
  content: ["query", "key"],
  rows: ["queries", "probabilities"],
};
/** Tensors that must be stored together. */
const PAIRS = [["zero_logits", "convolution_logits"], ["row_scores", "column_scores"], ["centres", "precision"], ["class_rows", "class_mass"]] as const;

function checkTensors(file: Safetensors, manifest: Manifest): void {
  const n = manifest.images.length;
  if (n > 0 || file.described.has("images")) checkTensor(file, "images", ["U8", "n", "height", "width", "3"], { n, "3": 3 });
  manifest.layers.forEach((layer, index) => checkLayer(file, layer, index, manifest));
  if (file.described.has("logits")) checkTensor(file, "logits", ["F32", "n", "c"], { n, c: manifest.classes.length });
}

function checkLayer(file: Safetensors, layer: Layer, index: number, manifest: Manifest): void {
  const [H, W] = layer.sizes;
  const sizes: Record<string, number> = {
    t: manifest.times.length, n: manifest.images.length, c: manifest.classes.length, h: layer.heads, H, W, T: H * W, "2": 2, prefix: layer.prefix,
    "2H-1": 2 * H - 1, "2W-1": 2 * W - 1,
  };
  const has = (name: string): boolean => file.described.has(`${index}.${name}`);
  if (layer.kind !== "positions" && manifest.images.length === 0) fail("images", `must be present for kind ${layer.kind}`, "none");
  for (const name of NEEDED[layer.kind]) if (!has(name)) fail(`${index}.${name}`, `must be present for kind ${layer.kind}`, "none");
  if (layer.kind === "positions" && !has("shift_scores") && !has("centres")) fail(`${index}.shift_scores`, "or centres must be present for kind positions", "none");
  for (const pair of PAIRS) {
    const [there, lost] = has(pair[0]) ? pair : [pair[1], pair[0]];
    if (has(there) && !has(lost)) fail(`${index}.${lost}`, `must be present with ${there}`, "none");
  }
  for (const [name, form] of Object.entries(FORMS)) if (has(name)) checkTensor(file, `${index}.${name}`, form, sizes);
  if (has("queries")) checkQueries(file.tensor(`${index}.queries`)!, `${index}.queries`, H * W);
}

/** Check a tensor's element type, shape and finite values. Only `images` may have no entries. */
function checkTensor(file: Safetensors, name: string, [kind, ...letters]: readonly [Kind, ...string[]], sizes: Record<string, number>): void {
  const tensor = file.described.get(name);
  const wanted = letters.map((letter) => sizes[letter] ?? letter).join(" x ");
  if (tensor === undefined) fail(name, `must be ${TYPES[kind]} of ${wanted}`, "none");
  if (tensor.kind !== kind) fail(name, `must be ${TYPES[kind]}`, TYPES[tensor.kind]);
  if (!fits(tensor.shape, letters, sizes)) fail(name, `must have the shape ${wanted}`, tensor.shape.join(" x "));
  const empty = tensor.shape.findIndex((extent, axis) => extent === 0 && letters[axis] !== "n");
  if (empty >= 0) fail(name, `must have at least 1 entry along ${letters[empty]}`, "none");
  file.tensor(name); // decoding rejects non-finite values
}

function checkQueries({ data }: Tensor, name: string, tokens: number): void {
  for (const token of data) if (token < 0 || token >= tokens) fail(name, `must be from 0 to ${tokens - 1}`, token);
}

/** Whether a shape matches; a letter without a size takes the extent that it first matches. */
function fits(shape: readonly number[], letters: readonly string[], sizes: Record<string, number>): boolean {
  if (shape.length !== letters.length) return false;
  return shape.every((extent, axis) => {
    const letter = letters[axis] ?? "";
    if (letter !== "" && sizes[letter] === undefined) sizes[letter] = extent;
    return letter === "" || sizes[letter] === extent;
  });
}

function fail(field: string, requirement: string, got: unknown): never {
  const shown = typeof got === "string" || typeof got === "number" ? got : JSON.stringify(got); // JSON would write Infinity as null
  throw new Error(`payload: ${field}: ${requirement}, got ${String(shown).slice(0, 80)}. Export it again: attnconv explore --export DIR`);
}

function record(value: unknown, path: string): Record<string, unknown> {
  return isRecord(value) ? value : fail(path, "must be an object", value);
}

function list(value: unknown, path: string): readonly unknown[] {
  return Array.isArray(value) ? value : fail(path, "must be a list", value);
}

function string(value: unknown, path: string): string {
  return typeof value === "string" ? value : fail(path, "must be text", value);
}

function boolean(value: unknown, path: string): boolean {
  return typeof value === "boolean" ? value : fail(path, "must be true or false", value);
}

function count(value: unknown, path: string, least: number): number {
  if (typeof value === "number" && Number.isSafeInteger(value) && value >= least && value <= 1e6) return value;
  return fail(path, `must be an integer from ${least} to 1000000`, value);
}

function pair(value: unknown, path: string): readonly [number, number] {
  const numbers = list(value, path).map((entry) => count(entry, path, 1));
  return numbers.length === 2 ? [numbers[0]!, numbers[1]!] : fail(path, "must be two integers", value);
}

function numberOrNull(value: unknown, path: string): number | null {
  if (value === null || (typeof value === "number" && Number.isFinite(value))) return value;
  return fail(path, "must be a finite number or null", value);
}
