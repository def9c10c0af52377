import { describe, expect, test } from "vitest";
import { errorBound, massOffNearest } from "../src/core/bounds";
import { convolve, difference, largest, range } from "../src/core/convolution";
import { type Geometry, tapShifts } from "../src/core/grid";
import { type Heads, attend, attentionOf } from "../src/core/theorem";
import fixtures from "./fixtures/theorem.json";
import { apart } from "./readFixture";

const CLOSE = 1e-6;
const all = fixtures.cases.map((entry) => {
  const geometry = entry.geometry as Geometry;
  const centres = entry.centres.map((centre) => [centre[0]!, centre[1]!] as const);
  const heads: Heads = { alpha: entry.alpha, centres, weights: entry.kernel, present: entry.kernel.map(() => true) };
  const image = { ...entry.image, data: Float64Array.from(entry.image.data) };
  const name = `${geometry.border}, stride ${geometry.stride}, dilation ${geometry.dilation}, alpha ${entry.alpha}`;
  return { name, entry, geometry, heads, image };
});

describe.each(all)("$name", ({ entry, geometry, heads, image }) => {
  test("attention is the library's", () => {
    expect(apart(attend(image, heads, geometry).data, entry.attention)).toBeLessThan(CLOSE);
  });

  test("one row of it is the library's", () => {
    const query = [entry.row.query[0]!, entry.row.query[1]!] as const;
    const row = attentionOf([image.height, image.width], query, heads, entry.row.head, geometry);
    expect(apart(row.data, entry.row.data)).toBeLessThan(CLOSE);
  });

  test("the convolution is PyTorch's", () => {
    expect(apart(convolve(image, entry.kernel, geometry).data, entry.convolution)).toBeLessThan(CLOSE);
  });

  test("error and bound are the library's, and the bound holds", () => {
    const error = largest(difference(attend(image, heads, geometry), convolve(image, entry.kernel, geometry)));
    const [low, high] = range(image.data);
    const bound = errorBound(heads, tapShifts(geometry), { low, high }, geometry.border);
    expect(Math.abs(error - entry.error)).toBeLessThan(CLOSE);
    expect(Math.abs(bound.total / entry.bound - 1)).toBeLessThan(CLOSE);
    expect(error).toBeLessThanOrEqual(bound.total);
  });
});

test("the probability outside the nearest key is the library's", () => {
  for (const { alpha, offsets, mass } of fixtures.masses) {
    expect(Math.abs(massOffNearest(alpha, offsets) - mass)).toBeLessThan(1e-12);
  }
});

describe("outside the theorem", () => {
  const { heads, geometry, image, entry } = all[0]!;
  const [low, high] = range(image.data);
  const error = (changed: Heads): number =>
    largest(difference(attend(image, changed, geometry), convolve(image, entry.kernel, geometry)));

  test("a misplaced head has its own term", () => {
    const changed = { ...heads, alpha: 40, centres: heads.centres.map((centre, h) => (h === 4 ? ([3, 2] as const) : centre)) };
    const bound = errorBound(changed, tapShifts(geometry), { low, high }, geometry.border);
    expect(bound.misplaced).toBeGreaterThan(0);
    expect(error(changed)).toBeGreaterThan(bound.soft + bound.rounding);
    expect(error(changed)).toBeLessThanOrEqual(bound.total);
  });

  test("a missing head has its own term", () => {
    const changed = { ...heads, alpha: 40, present: heads.present.map((_, h) => h !== 4) };
    const bound = errorBound(changed, tapShifts(geometry), { low, high }, geometry.border);
    expect(bound.missing).toBeGreaterThan(0);
    expect(error(changed)).toBeGreaterThan(bound.soft + bound.rounding);
    expect(error(changed)).toBeLessThanOrEqual(bound.total);
  });

  test("rounding includes all taps, since the convolution has all taps", () => {
    const changed = { ...heads, alpha: 40, present: heads.present.map(() => false) };
    const shifts = tapShifts(geometry);
    const [none, every] = [changed, { ...changed, present: heads.present }].map((some) =>
      errorBound(some, shifts, { low, high }, geometry.border),
    );
    expect(none!.rounding).toBeGreaterThan(0);
    expect(none!.rounding).toBe(every!.rounding);
    const { soft, misplaced, missing, rounding, total } = none!;
    expect(total).toBe(soft + rounding + misplaced + missing);
  });
});
