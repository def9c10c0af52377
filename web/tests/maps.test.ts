import { describe, expect, test } from "vitest";
import { type Choice, carried, choiceFor, emptyMaps, fillMaps, finest, lackOf, nearestStored, writeMap } from "../src/core/maps";
import { openPayload } from "../src/core/payload";
import type { Part } from "../src/core/rows";
import expected from "./fixtures/payload.json";
import { apart, fixture } from "./readFixture";

const payload = openPayload(fixture("payload.safetensors"));
const CHOICE: Choice = { part: "both", softmax: true, image: 0, mean: false, time: 0, prefix: -1 };

describe("the model explorer's maps equal the library's", () => {
  const cases = expected.maps.map((entry) => ({ ...entry, name: JSON.stringify(entry.place) + entry.part }));
  test.each(cases)("$name", ({ place, part, rows, mean }) => {
    const into = new Float64Array(mean.length);
    rows.forEach((row, image) => {
      expect(writeMap(payload, place, { ...CHOICE, part: part as Part, image }, into)).toBe(true);
      expect(apart(into, row)).toBeLessThan(1e-6);
    });
    expect(writeMap(payload, place, { ...CHOICE, part: part as Part, mean: true }, into)).toBe(true);
    expect(apart(into, mean)).toBeLessThan(1e-6);
  });
});

test("the maps of a layer are those of its heads, with their largest values", () => {
  const maps = emptyMaps(payload.manifest.layers[1]!);
  fillMaps(maps, payload, 1, 5, CHOICE);
  const alone = new Float64Array(12);
  for (const head of [0, 1]) {
    writeMap(payload, { layer: 1, head, query: 5 }, CHOICE, alone);
    expect(apart(maps.heads[head]!, alone)).toBe(0);
    expect(maps.largest[head]).toBe(Math.max(...alone));
  }
  expect(maps.lack).toBe("");
});

test("scores are relative to uniform attention, and their softmax is the row", () => {
  const [scores, row] = [new Float64Array(12), new Float64Array(12)];
  writeMap(payload, { layer: 2, head: 1, query: 3 }, { ...CHOICE, softmax: false }, scores);
  writeMap(payload, { layer: 2, head: 1, query: 3 }, CHOICE, row);
  expect(scores.reduce((sum, score) => sum + Math.exp(score) / 12, 0)).toBeCloseTo(1, 12);
  expect(apart(scores, row.map((probability) => Math.log(12 * probability)))).toBeLessThan(1e-12);
  const weights = scores.map(Math.exp);
  const sum = weights.reduce((total, weight) => total + weight, 0);
  expect(apart(weights.map((weight) => weight / sum), row)).toBeLessThan(1e-15);
});

test("a layer without the chosen scores has a message", () => {
  expect(lackOf(payload, 0, { ...CHOICE, part: "content" })).toMatch(/not use content/);
  expect(lackOf(payload, 3, { ...CHOICE, part: "position" })).toMatch(/not separate content and position/);
  expect(lackOf(payload, 3, { ...CHOICE, softmax: false })).toMatch(/no scores/);
  expect([0, 1, 2, 3].map((layer) => lackOf(payload, layer, CHOICE))).toEqual(["", "", "", ""]);
});

test("the nearest stored query is shown", () => {
  expect(nearestStored(payload, 0, 6)).toBe(6);
  expect([0, 1, 3, 6, 8, 11].map((token) => nearestStored(payload, 3, token))).toEqual([1, 1, 7, 7, 10, 7]);
});

test("positions are mapped between grids by their centres", () => {
  expect(finest(payload)).toEqual([3, 4]);
  expect(carried([5, 7], [8, 8], [4, 2])).toEqual([2, 1]);
  expect(carried([2, 1], [4, 2], [8, 8])).toEqual([5, 6]);
  expect(carried([99, 0], [8, 8], [8, 8])).toEqual([7, 0]);
});

test("a link's indices beyond the payload are clamped", () => {
  const choice = choiceFor(payload, { ...CHOICE, image: 9, time: -1 });
  expect([choice.image, choice.time]).toEqual([1, 1]);
  expect(choiceFor(payload, { ...CHOICE, time: 40 }).time).toBe(1);
});

test("an image is found by its name, at any index", () => {
  const [first, second] = payload.manifest.images.map(({ name }) => name);
  const image = (index: number, named: string) => choiceFor(payload, { ...CHOICE, image: index, named }).image;
  expect([image(5, first!), image(0, second!), image(1, second!), image(5, "elsewhere"), image(1, "")]).toEqual([0, 1, 1, 1, 1]);
});

test("a class token has its own rows", () => {
  const into = new Float64Array(12);
  const { class_rows: rows } = expected;
  for (const { image, head, row } of rows) {
    expect(writeMap(payload, { layer: 3, head, query: 0 }, { ...CHOICE, image, prefix: 0 }, into)).toBe(true);
    expect(Array.from(into)).toEqual(row);
  }
  expect(lackOf(payload, 3, { ...CHOICE, prefix: 0 })).toBe("");
  expect(lackOf(payload, 3, { ...CHOICE, prefix: 0, softmax: false })).toMatch(/no scores/);
  expect(lackOf(payload, 0, { ...CHOICE, prefix: 0 })).toMatch(/no such token/);
});
