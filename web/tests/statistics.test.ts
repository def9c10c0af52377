import { expect, test } from "vitest";
import { openPayload } from "../src/core/payload";
import { headStatistics, layerStatistics, sorted } from "../src/core/statistics";
import { fixture } from "./reading";

const payload = openPayload(fixture("payload.safetensors"));

test("a line for each head, columns that have numbers", () => {
  const { columns, lines } = headStatistics(payload);
  expect(columns).toEqual(["entropy"]);
  expect(lines.map(({ layer, head, numbers }) => [layer, head, numbers["entropy"]]).slice(0, 4)).toEqual([
    [0, 0, null], [0, 1, 0.25], [1, 0, null], [1, 1, 0.25],
  ]);
  expect(layerStatistics(payload).columns).toEqual([]);
});

test("sorting keeps equal lines in order and puts missing numbers last, either way", () => {
  const line = (head: number, entropy: number | null) => ({ layer: 0, head, name: "", numbers: { entropy } });
  const lines = [line(0, null), line(1, 2), line(2, 3), line(3, 2)];
  const heads = (column: string, down: boolean) => sorted(lines, column, down).map(({ head }) => head);
  expect(heads("entropy", true)).toEqual([2, 1, 3, 0]);
  expect(heads("entropy", false)).toEqual([1, 3, 2, 0]);
  expect(heads("head", true)).toEqual([3, 2, 1, 0]);
  expect(heads("no such column", true)).toEqual([0, 1, 2, 3]);
});
