import { describe, expect, test } from "vitest";
import { writeClassRow } from "../src/core/classTokens";
import { openPayload } from "../src/core/payload";
import { predictionsOf } from "../src/core/pictures";
import { partsOf, type Part, storedQueries, writeMeanRow, writeRow, writeScores } from "../src/core/rows";
import { readSafetensors } from "../src/core/safetensors";
import expected from "./fixtures/payload.json";
import { apart, fixture } from "./readFixture";

const bytes = fixture("payload.safetensors");
const payload = openPayload(bytes);
const header = Number(new DataView(bytes).getBigUint64(0, true));
const json = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 8, header))) as Record<string, Record<string, unknown>>;

const end = bytes.byteLength - 8 - header; // of the data

/** Return the fixture with a changed header and the same data. */
function changed(change: (header: typeof json) => void): ArrayBuffer {
  const copy = structuredClone(json);
  change(copy);
  const text = new TextEncoder().encode(JSON.stringify(copy));
  const file = new Uint8Array(8 + text.length + bytes.byteLength - 8 - header);
  new DataView(file.buffer).setBigUint64(0, BigInt(text.length), true);
  file.set(text, 8);
  file.set(new Uint8Array(bytes, 8 + header), 8 + text.length);
  return file.buffer;
}

function changedManifest(change: (manifest: Record<string, any>) => void): ArrayBuffer {
  return changed((all) => {
    const manifest = JSON.parse(String(all["__metadata__"]!["attnconv"]));
    change(manifest);
    all["__metadata__"]!["attnconv"] = JSON.stringify(manifest);
  });
}

/** Return the fixture with a statistic of its first layer as JSON text, which allows numbers beyond JavaScript's range. */
function spelled(part: "heads" | "layer", json: string): ArrayBuffer {
  return changed((all) => {
    const manifest = JSON.parse(String(all["__metadata__"]!["attnconv"]));
    manifest["layers"][0].statistics[part].odd = "here";
    all["__metadata__"]!["attnconv"] = JSON.stringify(manifest).replace('"here"', json);
  });
}

/** Return the fixture with changed values of a tensor. */
function written(name: string, change: (view: DataView) => void): ArrayBuffer {
  const copy = bytes.slice(0);
  const [begin, end] = json[name]!["data_offsets"] as [number, number];
  change(new DataView(copy, 8 + header + begin, end - begin));
  return copy;
}

/** Set the extents of the given size to 0 in a tensor's header entry. */
function emptied(tensor: Record<string, unknown>, extent: number): void {
  tensor["shape"] = (tensor["shape"] as number[]).map((size) => (size === extent ? 0 : size));
  tensor["data_offsets"] = [0, 0];
}

function withoutImages(all: typeof json): void {
  const manifest = JSON.parse(String(all["__metadata__"]!["attnconv"]));
  all["__metadata__"]!["attnconv"] = JSON.stringify({ ...manifest, images: [] });
  delete all["images"];
}

describe("rows", () => {
  test.each(expected.rows.map((row) => ({ ...row, name: `layer ${row.place.layer}, ${row.part}, snapshot ${row.place.time}` })))("$name", ({ place, part, row }) => {
    const into = new Float64Array(row.length);
    expect(writeRow(payload, place, part as Part, into)).toBe(true);
    expect(apart(into, row)).toBeLessThan(1e-6);
  });

  test("the mean over images is the mean of their rows", () => {
    const place = { layer: 1, head: 0, query: 5, image: 0, time: 0 };
    const [first, second, mean] = [new Float64Array(12), new Float64Array(12), new Float64Array(12)];
    writeRow(payload, place, "both", first);
    writeRow(payload, { ...place, image: 1 }, "both", second);
    writeMeanRow(payload, place, "both", mean);
    expect(apart(mean, first.map((value, index) => (value + second[index]!) / 2))).toBeLessThan(1e-15);
  });

  test("a query without a stored row returns false", () => {
    const place = { layer: 3, head: 0, query: 0, image: 0, time: 0 };
    expect(writeRow(payload, place, "both", new Float64Array(12))).toBe(false);
    expect(writeScores(payload, place, "both", new Float64Array(12))).toBe(false);
    expect(Array.from(storedQueries(payload, 3)!)).toEqual([1, 7, 10]);
    expect(storedQueries(payload, 0)).toBe(null);
  });

  test("the number of parts depends on the layer's kind", () => {
    expect([0, 1, 2, 3, 4].map((layer) => partsOf(payload, layer).length)).toEqual([1, 3, 3, 1, 1]);
  });

  test("the attention of class tokens is that of the library", () => {
    const into = new Float64Array(12);
    for (const { image, head, row } of expected.class_rows) {
      expect(writeClassRow(payload, { layer: 3, head, query: 0, image, time: 0 }, 0, into)).toBe(true);
      expect(Array.from(into)).toEqual(row);
    }
  });
});

describe("additions to the format", () => {
  test("labels, predictions, random weights and scores", () => {
    const { images, layers, random } = payload.manifest;
    expect(images).toEqual([
      { name: "image 0", label: "crest" },
      { name: "image 1", label: null },
    ]);
    expect(predictionsOf(payload, 0).map(([name]) => name)).toEqual(["steep", "crest", "trough"]);
    expect(predictionsOf(payload, 1)[0]).toEqual(["crest", expect.closeTo(0.5, 6)]);
    expect(random).toBe(true);
    expect(layers.map(({ scores }) => scores)).toEqual([...Array.from({ length: 4 }, () => [null, null]), [0.25, null]]);
  });

  test("older files have only the score of the last snapshot", () => {
    const file = changedManifest((manifest) => {
      delete manifest["random"];
      delete manifest["layers"][4].scores;
      manifest["layers"][4].statistics.layer.score = 0.5;
    });
    const { random, layers } = openPayload(file).manifest;
    expect(random).toBe(false);
    expect(layers[4]!.scores).toEqual([null, 0.5]);
  });
});

describe("invalid files", () => {
  const cases: [string, ArrayBuffer, RegExp][] = [
    ["nothing", new ArrayBuffer(0), /safetensors file, got 0 bytes/],
    ["text", new TextEncoder().encode("<!doctype html><title>a page</title>").buffer as ArrayBuffer, /header of \d+ bytes/],
    ["truncated in the header", bytes.slice(0, 100), /header of \d+ bytes in a file of 100/],
    ["truncated in the data", bytes.slice(0, bytes.byteLength - 1), /got \d+ bytes of data.* ends at \d+/],
    ["a header that is not JSON", new Uint8Array([2, 0, 0, 0, 0, 0, 0, 0, 64, 64]).buffer, /not JSON/],
    ["another program's file", changed((all) => delete all["__metadata__"]), /__metadata__: .*'attnconv'/],
    ["a tensor of 10^15 numbers", changed((all) => (all["images"]!["shape"] = [1e6, 1e6, 1e3, 3])), /images: must have 3000000000000000 bytes/],
    ["an unknown element type", changed((all) => (all["images"]!["dtype"] = "BF16")), /images: .*U8.*got BF16/],
    ["a later format", changedManifest((manifest) => (manifest["format"] = 2)), /format: must be 1, got 2/],
    ["heads that are text", changedManifest((manifest) => (manifest["layers"][0].heads = "2")), /layers\[0\]\.heads: must be an integer.*got 2\./],
    ["another grid", changedManifest((manifest) => (manifest["layers"][0].sizes = [4, 4])), /0\.shift_scores: must have the shape 2 x 2 x 7 x 7/],
    ["a window of one number", changedManifest((manifest) => (manifest["layers"][3].window = [7])), /layers\[3\]\.window: must /],
    ["a window without rows", changedManifest((manifest) => (manifest["layers"][3].window = [0, 7])), /layers\[3\]\.window: must /],
    ["a reason that is a number", changedManifest((manifest) => (manifest["left_out"] = { attention: 1 })), /left_out\.attention: must be/],
    ["an unknown kind", changedManifest((manifest) => (manifest["layers"][0].kind = "new")), /kind: must be one of positions/],
    ["a table too short", changedManifest((manifest) => (manifest["layers"][0].statistics.heads.entropy = [1])), /must have 2 entries, got 1/],
    ["a statistic above the largest number", spelled("layer", "1e999"), /layers\[0\]\.statistics\.layer\.odd: must be a finite number or null, got Infinity/],
    ["a statistic below the smallest number", spelled("layer", "-1e999"), /layers\[0\]\.statistics\.layer\.odd: must be .*, got -Infinity/],
    ["a head's statistic that is infinite", spelled("heads", "[1e999, null]"), /layers\[0\]\.statistics\.heads\.odd: must be .*, got Infinity/],
    ["a statistic that is a boolean", spelled("layer", "true"), /layers\[0\]\.statistics\.layer\.odd: must be .*, got true/],
    ["no statistics", changedManifest((manifest) => delete manifest["layers"][0].statistics), /layers\[0\]\.statistics: must be an object/],
    ["no statistics of heads", changedManifest((manifest) => delete manifest["layers"][0].statistics.heads), /layers\[0\]\.statistics\.heads: must be an object/],
    ["no statistics of the layer", changedManifest((manifest) => delete manifest["layers"][0].statistics.layer), /layers\[0\]\.statistics\.layer: must be an object/],
    ["statistics of heads that are null", changedManifest((manifest) => (manifest["layers"][0].statistics.heads = null)), /layers\[0\]\.statistics\.heads: must be an object/],
    ["no layers", changedManifest((manifest) => (manifest["layers"] = [])), /layers: must .* at least one layer/],
    ["a million heads", changedManifest((manifest) => (manifest["layers"][0].heads = 1e6)), /layers\[0\]\.heads: must be at most 4096/],
    ["a grid of 10^12 tokens", changedManifest((manifest) => (manifest["layers"][3].sizes = [1e6, 1e6])), /layers\[3\]\.sizes: must have at most 4000000 heads x tokens/],
    ["a grid without rows", changedManifest((manifest) => (manifest["layers"][0].sizes = [0, 4])), /layers\[0\]\.sizes: must be an integer from 1 to 1000000, got 0/],
    ["content without images", changed(withoutImages), /images: must be .* kind content, got none/],
    ["images without pixels", changed((all) => Object.assign(all["images"]!, { shape: [2, 0, 8, 3], data_offsets: [0, 0] })), /images: must have at least 1 entry along height/],
    ["images that the manifest does not name", changedManifest((manifest) => (manifest["images"] = [])), /images: must have the shape 0 x height x width x 3, got 2 x/],
    ["no stored rows", changed((all) => { for (const name of ["queries", "probabilities", "prefix_mass"]) emptied(all[`3.${name}`]!, 3); }), /3\.queries: must have at least 1 entry along m/],
    ["content of no channels", changed((all) => { for (const name of ["query", "key"]) emptied(all[`2.${name}`]!, 1); }), /2\.query: must have at least 1 entry along e/],
    ["another element type", changed((all) => (all["3.queries"]!["dtype"] = "F32")), /3\.queries: must be int32, got float32/],
    ["an element type named like a JavaScript property", changed((all) => (all["images"]!["dtype"] = "__proto__")), /images: .*U8.*got __proto__/],
    ["row scores without column scores", changed((all) => delete all["1.column_scores"]), /1\.column_scores: .* row_scores, got none/],
    ["column scores without row scores", changed((all) => delete all["1.row_scores"]), /1\.row_scores: .* column_scores, got none/],
    ["tensors that overlap", changed((all) => (all["0.centres"]!["data_offsets"] = [4, 36])), /0\.precision: must not overlap .* got bytes of tensor 0\.centres/],
    ["a tensor beyond the end of the file", changed((all) => (all["images"]!["data_offsets"] = [end - 287, end + 1])), /got (\d+) bytes of data.* tensor images ends at \d+/],
    ["a query outside", written("3.queries", (view) => view.setInt32(4, 12, true)), /3\.queries: must .* 0 to 11, got 12/],
    ["a negative query", written("3.queries", (view) => view.setInt32(0, -1, true)), /3\.queries: must .* 0 to 11, got -1/],
    ["a table with NaN", written("0.shift_scores", (view) => view.setFloat32(8, NaN, true)), /0\.shift_scores: must be finite, got NaN at entry 2/],
    ["an infinite key", written("1.key", (view) => view.setUint16(0, 0x7c00, true)), /1\.key: must be finite, got Infinity at entry 0/],
    ["neither a table nor Gaussians", changed((all) => { for (const name of ["centres", "precision"]) delete all[`4.${name}`]; }), /4\.shift_scores: or centres must .*positions, got none/],
    ["class rows without their mass", changed((all) => delete all["3.class_mass"]), /3\.class_mass: .* class_rows, got none/],
    ["class rows of two tokens", changedManifest((manifest) => (manifest["layers"][3].prefix = 2)), /3\.class_rows: must have the shape 2 x 2 x 2 x 12/],
    ["a label that is a number", changedManifest((manifest) => (manifest["images"][0].label = 3)), /images\[0\]\.label: must be text, got 3/],
    ["random weights in words", changedManifest((manifest) => (manifest["random"] = "yes")), /random: must be true or false, got yes/],
    ["a score too few", changedManifest((manifest) => (manifest["layers"][4].scores = [0.5])), /layers\[4\]\.scores: must have 2 entries.*got 1/],
    ["a score in words", changedManifest((manifest) => (manifest["layers"][4].scores = [0.5, "high"])), /layers\[4\]\.scores\[1\]: must be a finite/],
    ["a missing tensor", changed((all) => delete all["1.key"]), /1\.key: must be .*, got none/],
  ];
  test.each(cases)("%s", (_, file, message) => {
    expect(() => openPayload(file)).toThrow(message);
  });

  test("truncated files are rejected", () => {
    for (let length = 0; length < bytes.byteLength; length += 97) {
      expect(() => openPayload(bytes.slice(0, length))).toThrow(/payload/);
    }
  });
});

test("a layer's window may be given, null or missing", () => {
  const file = changedManifest((manifest) => {
    manifest["layers"][1].window = null;
    manifest["layers"][3].window = [2, 3];
  });
  expect(openPayload(file).manifest.layers.map(({ window }) => window)).toEqual([null, null, null, [2, 3], null]);
});

test("float16 is converted exactly", () => {
  const halves = new Uint16Array([0x0000, 0x8000, 0x3c00, 0xc000, 0x0001, 0x03ff, 0x7bff, 0xfbff, 0x3555]);
  const head = `{"x":{"dtype":"F16","shape":[9],"data_offsets":[0,18]}}`;
  const file = new Uint8Array(8 + head.length + 18);
  new DataView(file.buffer).setBigUint64(0, BigInt(head.length), true);
  file.set(new TextEncoder().encode(head), 8);
  file.set(new Uint8Array(halves.buffer), 8 + head.length);
  const data = readSafetensors(file.buffer).tensor("x")!.data;
  expect(Array.from(data)).toEqual([0, -0, 1, -2, 2 ** -24, 1023 * 2 ** -24, 65504, -65504, 0.333251953125]);
});

test("statistics may have any name", () => {
  const file = changedManifest((manifest) => {
    manifest["layers"][0].statistics = JSON.parse('{"heads": {"__proto__": [1, 2], "layer": [3, 4]}, "layer": {"toString": 5}}');
    manifest["layers"][1].statistics = { heads: {}, layer: {} };
  });
  const [first, second] = openPayload(file).manifest.layers;
  expect(Object.keys(first!.statistics.heads)).toEqual(["__proto__", "layer"]);
  expect(first!.statistics.heads["__proto__"]).toEqual([1, 2]);
  expect(first!.statistics.layer["toString"]).toBe(5);
  expect(second!.statistics.heads["__proto__"]).toBeUndefined();
  expect(second!.statistics.layer["toString"]).toBeUndefined();
});
