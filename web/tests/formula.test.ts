import { expect, test } from "vitest";
import { formulaOf } from "../src/core/formula";
import { openPayload } from "../src/core/payload";
import { PARTS, type Part } from "../src/core/rows";
import expected from "./fixtures/payload.json";
import { fixture } from "./readFixture";

const payload = openPayload(fixture("payload.safetensors"));
const BOTH = { part: "both", prefix: -1 } as const;

test.each(expected.rows)("the terms give the library's probability: $place.layer, $part, snapshot $place.time", ({ place, part, row }) => {
  row.forEach((share, key) => {
    const formula = formulaOf(payload, place, { part: part as Part, prefix: -1 }, key)!;
    expect(formula.probability).toBeCloseTo(share, 6);
    const { softmax, content, along, table, gaussian } = formula;
    if (softmax === null) return;
    const terms = [content?.score ?? 0, ...(along ?? [0, 0]), table ?? gaussian?.score ?? 0];
    expect(terms.reduce((sum, term) => sum + term, 0)).toBeCloseTo(softmax.score, 12);
    expect(softmax.weight / softmax.sum).toBeCloseTo(share, 6);
  });
});

test("a Gaussian head's formula equals its table up to a constant", () => {
  const constants: number[] = [];
  for (let query = 0; query < 12; query++) {
    for (let key = 0; key < 12; key++) {
      const { gaussian, table } = formulaOf(payload, { layer: 0, head: 1, query, image: 0, time: 1 }, BOTH, key)!;
      constants.push(gaussian!.score - table!);
    }
  }
  expect(Math.max(...constants) - Math.min(...constants)).toBeLessThan(1e-5); // both stored in float32
  expect(new Set(constants.map(Math.round)).size).toBe(1);
});

test("omitted parts have no terms", () => {
  const terms = PARTS.map((part) => formulaOf(payload, { layer: 1, head: 0, query: 4, image: 1, time: 0 }, { part, prefix: -1 }, 6)!);
  expect(terms.map(({ content }) => content !== null)).toEqual([true, true, false]);
  expect(terms.map(({ along }) => along !== null)).toEqual([true, false, true]);
  expect(terms[0]!.shift).toEqual([0, 2]);
});

test("stored rows have a probability and the probability elsewhere, other rows have none", () => {
  const place = { layer: 3, head: 0, query: 7, image: 1, time: 0 };
  const formula = formulaOf(payload, place, BOTH, 2)!;
  expect(formula.softmax).toBe(null);
  expect(formula.elsewhere).toBe(payload.of(3, "prefix_mass")!.data[7]);
  expect(formulaOf(payload, { ...place, query: 6 }, BOTH, 2)).toBe(null);
});
