/** Deterministic payloads of any size for the browser tests, made of sine waves. */

/** Return the bytes of a safetensors file; `tensors` maps names to [dtype, shape, typed array]. */
function safetensors(tensors, manifest) {
  const header = { __metadata__: { attnconv: JSON.stringify(manifest) } };
  let end = 0;
  for (const [name, [dtype, shape, data]] of Object.entries(tensors)) {
    header[name] = { dtype, shape, data_offsets: [end, (end += data.byteLength)] };
  }
  const text = Buffer.from(JSON.stringify(header));
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(text.length));
  const parts = Object.values(tensors).map(([, , data]) => Buffer.from(data.buffer));
  return Buffer.concat([length, text, ...parts]);
}

const waves = (count, step) => Float32Array.from({ length: count }, (_, index) => Math.sin(step * index + 1.3e-4 * index ** 2));

/** Gaussian heads with centres that move over `times` snapshots; `uniform` heads have the same score for all keys. */
function gaussians({ times, heads, sizes: [height, width], uniform }, phase) {
  const [down, across] = [2 * height - 1, 2 * width - 1];
  const table = new Float32Array(times * heads * down * across);
  const centres = new Float32Array(times * heads * 2);
  const precision = new Float32Array(times * heads * 4);
  for (let which = 0; which < times * heads; which++) {
    const centre = [4 * Math.sin(1.7 * which + phase), 4 * Math.cos(2.3 * which + phase)];
    const sharp = uniform ? 0 : 0.15 + 0.1 * Math.sin(which);
    centres.set(centre, 2 * which);
    precision.set([sharp, 0, 0, sharp], 4 * which);
    for (let row = 0; row < down; row++) {
      for (let column = 0; column < across; column++) {
        const off = [row - height + 1 - centre[0], column - width + 1 - centre[1]];
        table[(which * down + row) * across + column] = -0.5 * sharp * (off[0] ** 2 + off[1] ** 2);
      }
    }
  }
  return { shift_scores: ["F32", [times, heads, down, across], table], centres: ["F32", [times, heads, 2], centres],
    precision: ["F32", [times, heads, 2, 2], precision] };
}

/** Convert to float16 by truncation; numbers below 2^-14 become 0. */
function halves(numbers) {
  const bits = new Uint32Array(Float32Array.from(numbers).buffer);
  return Uint16Array.from(bits, (one) => {
    const exponent = ((one >> 23) & 0xff) - 112;
    return ((one >>> 16) & 0x8000) | (exponent > 0 ? (exponent << 10) | ((one >> 13) & 0x3ff) : 0);
  });
}

function contents({ heads, sizes: [height, width], extent }, phase) {
  const tokens = height * width;
  const vectors = (step) => ["F16", [1, heads, tokens, extent], halves(waves(heads * tokens * extent, step + phase / 10))];
  const scores = (size, step) => ["F16", [1, heads, tokens, size], halves(waves(heads * tokens * size, step))];
  return { query: vectors(0.7), key: vectors(1.1), row_scores: scores(height, 0.3), column_scores: scores(width, 2.1) };
}

/** The other columns of the statistics, with values of different magnitudes. */
function statistics(heads, layer) {
  const column = (size, step) => Array.from({ length: heads }, (_, head) => size * Math.abs(Math.sin(step * head + layer)));
  return { "best row": column(1, 0).map((_, head) => (head % 3) - 1), mass: column(1, 0.4), constancy: column(1, 0.9), distance: column(12, 0.5),
    "mass elsewhere": column(0.004, 1.1), "content share": column(1, 1.7), "gaussian overlap": column(1, 0.2) };
}

/** Rows of attention that is uniform, from the class token too, except that head 0 attends only to token 0. */
function flat({ heads, sizes: [height, width] }, images) {
  const tokens = height * width;
  const rows = (queries) => Array.from({ length: images * heads * queries * tokens }, (_, at) => {
    const [head, key] = [Math.floor(at / (queries * tokens)) % heads, at % tokens];
    return head === 0 ? Number(key === 0) : 1 / tokens;
  });
  return {
    queries: ["I32", [tokens], Int32Array.from({ length: tokens }, (_, token) => token)],
    probabilities: ["F16", [images, heads, tokens, tokens], halves(rows(tokens))],
    class_rows: ["F16", [images, heads, 1, tokens], halves(rows(1))],
    class_mass: ["F16", [images, heads, 1], halves(new Float32Array(images * heads).fill(0.25))],
  };
}

/** Labels of images, and the model's probabilities: the first image is predicted correctly, the second is not. */
const CLASSES = ["frog", "ship", "truck", "cat"];
const LABELS = [{ label: "frog" }, { label: "ship" }];
const PROBABILITIES = [[0.75, 0.0625, 0.0625, 0.125], [0.05, 0.4, 0.5, 0.05], [0.25, 0.25, 0.25, 0.25]];
/** The same with a head switched off, or replaced with the nearest convolution. */
const CHANGED = { zero: [0.25, 0.125, 0.125, 0.5], convolution: [0.625, 0.125, 0.125, 0.125] };

function logits(images, layers, heads) {
  const logs = (rows) => rows.flat().map(Math.log);
  const found = { logits: ["F32", [images, 4], Float32Array.from(logs(PROBABILITIES.slice(0, images)))] };
  for (let layer = 0; layer < layers; layer++) {
    for (const [kind, row] of Object.entries(CHANGED)) {
      found[`${layer}.${kind}_logits`] = ["F16", [images, heads, 4], halves(logs(Array.from({ length: images * heads }, () => row)))];
    }
  }
  return found;
}

export function made({
  kind = "positions", layers = 6, heads = 9, side = 32, sizes = [side, side], picture = [64, 64], times = 1, extent = 32, title = "Waves", also = {},
  images = 1, known = false, random = false, scores = null, uniform = false, leftOut = {},
} = {}) {
  const pixels = Uint8Array.from({ length: images * picture[0] * picture[1] * 3 }, (_, index) => 128 + 100 * Math.sin(index / 97));
  const tensors = { images: ["U8", [images, ...picture, 3], pixels], ...(known ? logits(images, layers, heads) : {}) };
  for (let layer = 0; layer < layers; layer++) {
    const own = kind === "positions" ? gaussians({ times, heads, sizes, uniform }, layer)
      : kind === "rows" ? flat({ heads, sizes }, images) : contents({ heads, sizes, extent }, layer);
    for (const [name, tensor] of Object.entries(own)) tensors[`${layer}.${name}`] = tensor;
  }
  const entropy = (layer) => Array.from({ length: heads }, (_, head) => (head === 3 ? null : 2 + Math.sin(head + layer)));
  return safetensors(tensors, {
    format: 1, title, library: "0", patch: null, random, left_out: leftOut, classes: known ? CLASSES : [],
    images: Array.from({ length: images }, (_, image) => ({ name: image === 0 ? "waves" : `waves ${image}`, ...(known ? LABELS[image] : {}) })),
    times: Array.from({ length: times }, (_, time) => `epoch ${time}`),
    layers: Array.from({ length: layers }, (_, layer) => ({
      name: `layer ${layer}`, kind, heads, sizes, ...(scores ? { scores } : {}), prefix: kind === "rows" ? 1 : 0, border: "none", encoding: kind, dilated: false,
      statistics: {
        heads: { entropy: entropy(layer), ...statistics(heads, layer), ...also.heads },
        layer: { score: 0.9 - 0.1 * layer, coverage: 0.25 * layer, "3 x 3 missed": 4e-7, "odd one": layer, ...also.layer },
      },
    })),
  });
}
