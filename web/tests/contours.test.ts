import { describe, expect, test } from "vitest";
import { type Ellipse, ellipse, gaussianContour, levelOf, meanOf, outline } from "../src/core/contours";

const WIDTH = 13;
const PRECISION = [0.5, 0.2, 0.2, 0.25];
const CENTRE = [4.3, 7.1] as const;

const off = (key: number, [row, column]: readonly [number, number]): [number, number] => [Math.floor(key / WIDTH) - row, (key % WIDTH) - column];
const squared = ([down, right]: readonly [number, number]): number =>
  PRECISION[0]! * down ** 2 + 2 * PRECISION[1]! * down * right + PRECISION[3]! * right ** 2;
const weights = Float64Array.from({ length: 10 * WIDTH }, (_, key) => Math.exp(-0.5 * squared(off(key, CENTRE))));
const total = weights.reduce((sum, weight) => sum + weight, 0);
const map = weights.map((weight) => weight / total);

/** Whether a position is inside an ellipse, computed from its axes and angle. */
function inside({ centre, axes, angle }: Ellipse, [row, column]: readonly [number, number]): boolean {
  const [down, right] = [row - centre[0], column - centre[1]];
  const along = right * Math.cos(angle) + down * Math.sin(angle);
  const across = -right * Math.sin(angle) + down * Math.cos(angle);
  return (along / axes[0]) ** 2 + (across / axes[1]) ** 2 < 1;
}

describe("the smallest set with a share of the mass", () => {
  test.each([0.1, 0.5, 0.9, 0.999])("of %d", (share) => {
    const level = levelOf(map, share);
    const held = map.filter((value) => value >= level);
    expect(held.reduce((sum, value) => sum + value, 0)).toBeGreaterThanOrEqual(share);
    expect(held.filter((value) => value > level).reduce((sum, value) => sum + value, 0)).toBeLessThan(share);
  });

  test("of equal tokens, of one token and of an empty map", () => {
    expect(levelOf(new Float64Array(10).fill(0.1), 0.5)).toBe(0.1);
    expect(levelOf(Float64Array.of(0, 1, 0), 0.9)).toBe(1);
    expect(levelOf(new Float64Array(3), 0.9)).toBe(0);
  });

  test.each([0.5, 0.9])("the ellipse for %d contains exactly its tokens", (share) => {
    const level = levelOf(map, share);
    const found = gaussianContour(map, WIDTH, level, { centre: CENTRE, precision: PRECISION })!;
    const places = Array.from(map, (_, key) => [Math.floor(key / WIDTH), key % WIDTH] as const);
    expect(places.map((place) => inside(found, place))).toEqual(Array.from(map, (value) => value >= level));
  });
});

test("an ellipse needs a positive definite matrix", () => {
  expect(ellipse([0, 0], [1, 0, 0, 0], 1)).toBe(null);
  expect(ellipse([0, 0], [1, 2, 2, 1], 1)).toBe(null);
  expect(ellipse([0, 0], [4, 0, 0, 1], 3)!.axes).toEqual([3, 1.5]);
});

test("an outline consists of straight segments along the boundary", () => {
  const lines: number[][] = [];
  outline(Float64Array.of(0, 1, 1, 0, 0, 1), 3, 0.5, (...edge) => lines.push(edge));
  const across = [[0, 1, 0, 3], [1, 1, 1, 2], [2, 2, 2, 3]];
  const down = [[0, 1, 1, 1], [1, 2, 2, 2], [0, 3, 2, 3]];
  expect(lines).toEqual([...across, ...down]);
});

test("the mean position is weighted by mass", () => {
  expect(meanOf(Float64Array.of(0, 1, 0, 3), 2)).toEqual([0.75, 1]);
  expect(meanOf(new Float64Array(4), 2)).toBe(null);
});

test("an outline does not depend on an earlier map of another shape", () => {
  const edges = (height: number, width: number, full: boolean) => {
    const found: string[] = [];
    const map = new Float64Array(height * width);
    if (full) map.fill(1);
    else map[0] = 1;
    outline(map, width, 0.5, (...edge) => found.push(edge.join()));
    return found.sort();
  };
  expect(edges(9, 4, true)).toEqual(["0,0,0,4", "0,0,9,0", "0,4,9,4", "9,0,9,4"]);
  expect(edges(4, 9, false)).toEqual(["0,0,0,1", "0,0,1,0", "0,1,1,1", "1,0,1,1"]);
});
