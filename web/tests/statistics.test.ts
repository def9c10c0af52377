import { expect, test } from "vitest";
import { aboutLayer } from "../src/core/layerSummary";
import { columnNamed } from "../src/core/columns";
import { openPayload } from "../src/core/payload";
import { alike, columnOf, elsewhereOf, headStatistics, layerStatistics, roughness, sorted } from "../src/core/statistics";
import { fixture } from "./readFixture";

const payload = openPayload(fixture("payload.safetensors"));

test("a row for each head, and only columns with values", () => {
  const { columns, lines } = headStatistics(payload);
  expect(columns).toEqual(["entropy"]);
  expect(lines.map(({ layer, head, numbers }) => [layer, head, numbers["entropy"]]).slice(0, 4)).toEqual([
    [0, 0, null], [0, 1, 0.25], [1, 0, null], [1, 1, 0.25],
  ]);
  expect(layerStatistics(payload).columns).toEqual([]);
});

test("sorting is stable, with missing values last in both directions", () => {
  const line = (head: number, entropy: number | null) => ({ layer: 0, head, name: "", numbers: { entropy } });
  const lines = [line(0, null), line(1, 2), line(2, 3), line(3, 2)];
  const heads = (column: string, down: boolean) => sorted(lines, column, down).map(({ head }) => head);
  expect(heads("entropy", true)).toEqual([2, 1, 3, 0]);
  expect(heads("entropy", false)).toEqual([1, 3, 2, 0]);
  expect(heads("head", true)).toEqual([3, 2, 1, 0]);
  expect(heads("no such column", true)).toEqual([0, 1, 2, 3]);
});

test("a statistic may be named like an index column", () => {
  const names = ["layer", "head", "=layer", "entropy", "=entropy", "layers", ""];
  const columns = names.map(columnOf);
  expect(columns).toEqual(["=layer", "=head", "==layer", "entropy", "=entropy", "layers", ""]);
  const line = (head: number, layer: number, odd: number) => ({ layer: 0, head, name: "", numbers: { layer, "=layer": odd } });
  const lines = [line(0, 2, 5), line(1, 3, 4), line(2, 1, 6)];
  const heads = (column: string) => sorted(lines, column, true).map(({ head }) => head);
  expect(heads(columnOf("layer"))).toEqual([1, 0, 2]);
  expect(heads(columnOf("=layer"))).toEqual([2, 0, 1]);
  expect(heads("layer")).toEqual([0, 1, 2]);
});

test("the decimals of a column give its largest value three digits", () => {
  const texts = (values: (number | null)[]) => values.map(alike(values));
  expect(texts([0.12345, -12.345, null, 1])).toEqual(["0.1", "−12.3", "–", "1.0"]);
  expect(texts([0.5, 1, 0, 1e-6, -4e-4])).toEqual(["0.50", "1.00", "0.00", "1.0 × 10⁻⁶", "−4.0 × 10⁻⁴"]);
  expect(texts([3, -1, 0])).toEqual(["3", "−1", "0"]);
  expect(texts([123456.7, 2.5])).toEqual(["123000", "3"]);
  expect(texts([2e-7, 0])).toEqual(["2.0 × 10⁻⁷", "0.000"]);
  expect(texts([null])).toEqual(["–"]);
});

test("columns have a description with a unit, and unknown columns only their name", () => {
  expect(columnNamed("entropy").words).toMatch(/nats/);
  expect(columnNamed("distance").words).toMatch(/tokens/);
  expect(columnNamed("constructor")).toEqual({ title: "constructor", words: "" });
});

test("a layer's summary", () => {
  const first = payload.manifest.layers[0]!;
  expect(elsewhereOf(first)).toBe(null);
  const statistics = { heads: { "mass elsewhere": [0.1, null, 0.3] }, layer: { score: 0.5 } };
  const layer = { ...first, kind: "rows" as const, encoding: "Attention", sizes: [2, 3] as const, prefix: 5, statistics };
  const queries = { shape: [2], data: Int32Array.from([0, 4]) } as unknown as ReturnType<typeof payload.of>;
  const about = (changed: object) =>
    aboutLayer({ ...payload, manifest: { ...payload.manifest, layers: [{ ...layer, ...changed }] }, of: () => queries }, 0);
  expect(about({})).toBe(
    "stored rows · Attention · 2 × 3 tokens + 5 class tokens and registers · 20% of attention on class tokens and registers" +
      " · rows stored for 2 of 6 queries, the nearest one is shown",
  );
  expect(about({ prefix: 1, sizes: [1, 2] })).toBe(
    "stored rows · Attention · 1 × 2 tokens + 1 class token · 20% of attention on the class token",
  );
  expect(about({ prefix: 0, sizes: [1, 2] })).toBe("stored rows · Attention · 1 × 2 tokens · 20% of attention on padding");
  expect(about({ prefix: 0, sizes: [1, 2], window: [1, 7] })).toBe(
    "stored rows · Attention · 1 × 2 tokens · 20% of attention on padding · attention within windows of 1 × 7 tokens",
  );
  expect(elsewhereOf(layer)).toBe(0.2);
});

test("layers with approximate scores have a warning with the size of the errors", () => {
  const first = payload.manifest.layers[0]!;
  const rough = (layer: Record<string, number | null>) => roughness({ ...first, statistics: { heads: {}, layer } });
  expect(rough({ "rounding of scores": 0.25 })).toMatch(/0\.25 nats.* 1\.65 /);
  expect([rough({}), rough({ "rounding of scores": null }), rough({ "rounding of scores": 0.01 })]).toEqual(["", "", ""]);
});
