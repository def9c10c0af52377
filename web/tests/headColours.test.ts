import { describe, expect, test } from "vitest";
import { headColour } from "../src/draw/headColours";
import { gaussianEllipse, rangeOf, trailPath } from "../src/draw/headPlane";

const channels = (colour: string): number[] => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16) / 255);
const linear = (value: number): number => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
const luminance = (colour: string): number => channels(colour).reduce((sum, value, at) => sum + [0.2126, 0.7152, 0.0722][at]! * linear(value), 0);
const contrast = (one: string, other: string): number => {
  const [dark, light] = [luminance(one), luminance(other)].sort((left, right) => left - right);
  return (light! + 0.05) / (dark! + 0.05);
};
const apart = (one: string, other: string): number => Math.hypot(...channels(one).map((value, at) => value - channels(other)[at]!));

describe.each([4, 6, 8, 9, 12, 16, 64])("the colours of %i heads", (heads) => {
  const colours = Array.from({ length: heads }, (_, head) => headColour(head, heads));

  test("are all different", () => expect(new Set(colours).size).toBe(heads));

  test("are visible on light and dark backgrounds, and black numbers are readable on them", () => {
    for (const colour of colours) {
      expect(contrast(colour, "#ffffff")).toBeGreaterThan(3);
      expect(contrast(colour, "#14171a")).toBeGreaterThan(3);
      expect(contrast(colour, "#101418")).toBeGreaterThan(4.5);
    }
  });

  test("of neighbouring heads are very different", () => {
    for (let head = 1; head < heads; head++) expect(apart(colours[head]!, colours[head - 1]!)).toBeGreaterThan(0.3);
  });
});

test("a single head has a colour", () => expect(headColour(0, 1)).toMatch(/^#[0-9a-f]{6}$/));

test("the ellipse of a share of a Gaussian contains that share", () => {
  const found = gaussianEllipse([0.25, 0, 0, 4], 0.5)!; // standard deviations of 2 rows and 0.5 columns
  expect(found.rx).toBeCloseTo(2 * Math.sqrt(2 * Math.LN2), 12);
  expect(found.ry).toBeCloseTo(0.5 * Math.sqrt(2 * Math.LN2), 12);
  expect(Math.abs(found.angle)).toBeCloseTo(90, 12);
  expect(gaussianEllipse([0, 0, 0, 0], 0.5)).toBe(null);
  expect(gaussianEllipse([Infinity, 0, 0, Infinity], 0.5)).toBe(null);
});

test("the plane shows all centres and trails, within limits", () => {
  const heads = [{ head: 0, centre: [1, -2.2], trail: [[0, 4.5]] }, { head: 1, centre: null }] as const;
  expect(rangeOf(heads, 2, 99)).toBe(5.75);
  expect(rangeOf(heads, 2, 3)).toBe(3);
  expect(rangeOf([], 2, 3)).toBe(2);
});

test("a trail is a line of (column, row)", () => {
  expect(trailPath([[1, 2]])).toBe("");
  expect(trailPath([[1, 2], [0.5, -1]])).toBe("M2.000 1.000L-1.000 0.500");
});
