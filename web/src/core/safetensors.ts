/**
 * Reader for safetensors files: 8 bytes with the length of a JSON header, the header, then the tensors' bytes.
 *
 * The header is validated before any tensor is decoded, and decoded tensors are at most twice as large as the file, so
 * that an invalid file raises an error and never causes a large allocation.
 */
export type Kind = "U8" | "I32" | "F16" | "F32" | "F64";
export type Numbers = Uint8Array | Int32Array | Float32Array | Float64Array;

export interface Tensor {
  readonly kind: Kind;
  readonly shape: readonly number[];
  /** Row-major; float16 entries are converted to float32 exactly. */
  readonly data: Numbers;
}

export interface Safetensors {
  readonly metadata: Readonly<Record<string, string>>;
  /** Element type and shape of every tensor, by name. */
  readonly described: ReadonlyMap<string, { readonly kind: Kind; readonly shape: readonly number[] }>;
  /** Return a tensor or null. It is decoded and checked for finite values at the first call, then cached. */
  tensor(name: string): Tensor | null;
}

interface Entry {
  readonly kind: Kind;
  readonly shape: readonly number[];
  readonly begin: number;
  readonly end: number;
}

const BYTES: Record<Kind, number> = { U8: 1, I32: 4, F16: 2, F32: 4, F64: 8 };
const LONGEST_HEADER = 16 * 2 ** 20;

export function readSafetensors(bytes: ArrayBuffer): Safetensors {
  const header = readHeader(bytes);
  const entries = new Map<string, Entry>();
  let metadata: Record<string, string> = {};
  for (const [name, value] of Object.entries(header.json)) {
    if (name === "__metadata__") metadata = textsOf(value);
    else entries.set(name, entryOf(name, value, bytes.byteLength - header.end));
  }
  refuseOverlaps(entries);
  const decoded = new Map<string, Tensor>();
  const tensor = (name: string): Tensor | null => {
    const entry = entries.get(name);
    if (entry === undefined) return null;
    const known = decoded.get(name) ?? finite(name, decode(bytes, header.end, entry));
    decoded.set(name, known);
    return known;
  };
  return { metadata, described: entries, tensor };
}

function fail(requirement: string): never {
  throw new Error(`payload: ${requirement}. Export it again: attnconv explore --export DIR`);
}

function readHeader(bytes: ArrayBuffer): { json: Record<string, unknown>; end: number } {
  if (bytes.byteLength < 10) fail(`must be a safetensors file, got ${bytes.byteLength} bytes`);
  const length = Number(new DataView(bytes).getBigUint64(0, true));
  if (length < 2 || length > LONGEST_HEADER || 8 + length > bytes.byteLength) {
    fail(`must be a complete safetensors file, got a header of ${length} bytes in a file of ${bytes.byteLength}`);
  }
  let json: unknown;
  try {
    json = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(bytes, 8, length)));
  } catch {
    fail("must be a safetensors file, got a header that is not JSON");
  }
  if (!isRecord(json)) fail("must be a safetensors file, got a header that is not an object");
  return { json, end: 8 + length };
}

function entryOf(name: string, value: unknown, available: number): Entry {
  if (!isRecord(value)) fail(`tensor ${name}: must have an object as its header entry`);
  const { dtype, shape, data_offsets: offsets } = value;
  if (typeof dtype !== "string" || !Object.hasOwn(BYTES, dtype)) {
    fail(`tensor ${name}: must have one of the dtypes ${Object.keys(BYTES).join(", ")}, got ${String(dtype)}`);
  }
  if (!areCounts(shape) || !areCounts(offsets) || offsets.length !== 2) {
    fail(`tensor ${name}: must have a shape and two offsets, all non-negative integers`);
  }
  const [begin, end] = offsets as [number, number];
  const kind = dtype as Kind;
  const size = shape.reduce((product, extent) => product * extent, BYTES[kind]);
  if (end - begin !== size) fail(`tensor ${name}: must have ${size} bytes, got ${end - begin}`);
  if (end > available) fail(`must be a complete file, got ${available} bytes of data, but tensor ${name} ends at ${end}`);
  return { kind, shape, begin, end };
}

/** Reject overlapping tensors: otherwise a small file could declare many large ones. */
function refuseOverlaps(entries: ReadonlyMap<string, Entry>): void {
  const filled = [...entries].filter(([, { begin, end }]) => end > begin).sort(([, one], [, other]) => one.begin - other.begin);
  filled.forEach(([name, { begin }], index) => {
    const before = filled[index - 1];
    if (before && begin < before[1].end) fail(`tensor ${name}: must not overlap other tensors, got bytes of tensor ${before[0]}`);
  });
}

function finite(name: string, tensor: Tensor): Tensor {
  const { kind, data } = tensor;
  const wrong = kind === "U8" || kind === "I32" ? -1 : data.findIndex((value: number) => !Number.isFinite(value));
  if (wrong >= 0) fail(`tensor ${name}: must be finite, got ${data[wrong]} at entry ${wrong}`);
  return tensor;
}

function decode(bytes: ArrayBuffer, start: number, entry: Entry): Tensor {
  const own = bytes.slice(start + entry.begin, start + entry.end); // a copy, aligned for any element type
  const { kind, shape } = entry;
  if (kind === "U8") return { kind, shape, data: new Uint8Array(own) };
  if (kind === "I32") return { kind, shape, data: new Int32Array(own) };
  if (kind === "F32") return { kind, shape, data: new Float32Array(own) };
  if (kind === "F64") return { kind, shape, data: new Float64Array(own) };
  return { kind, shape, data: widened(new Uint16Array(own)) };
}

/** Convert float16 (1 sign bit, 5 exponent bits, 10 fraction bits) to float32. Older browsers have no Float16Array. */
function widened(halves: Uint16Array): Float32Array {
  const numbers = new Float32Array(halves.length);
  halves.forEach((half, index) => {
    const sign = half & 0x8000 ? -1 : 1;
    const exponent = (half >> 10) & 0x1f;
    const fraction = half & 0x3ff;
    if (exponent === 31) numbers[index] = fraction ? NaN : sign * Infinity;
    else if (exponent === 0) numbers[index] = sign * fraction * 2 ** -24;
    else numbers[index] = sign * (1024 + fraction) * 2 ** (exponent - 25);
  });
  return numbers;
}

export function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function areCounts(value: unknown): value is number[] {
  return Array.isArray(value) && value.every((entry) => Number.isSafeInteger(entry) && entry >= 0);
}

function textsOf(value: unknown): Record<string, string> {
  if (!isRecord(value)) fail("__metadata__: must be an object");
  return Object.fromEntries(Object.entries(value).filter((pair): pair is [string, string] => typeof pair[1] === "string"));
}
