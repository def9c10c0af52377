import { describe, expect, test } from "vitest";
import { LEAST_HEIGHT, frameOf, heightOf } from "../src/draw/maps";

describe("the visible part of a grid", () => {
  test("is the whole grid without a close-up", () => {
    expect(frameOf([32, 64], [3, 60], false)).toEqual({ top: 0, left: 0, rows: 32, columns: 64 });
  });

  test.each([
    [[32, 64], [3, 60], { top: -4, left: 53, rows: 15, columns: 15 }],
    [[1, 400], [0, 200], { top: 0, left: 193, rows: 1, columns: 15 }],
    [[12, 30], [2, 20], { top: 0, left: 13, rows: 12, columns: 15 }],
    [[15, 15], [7, 7], { top: 0, left: 0, rows: 15, columns: 15 }],
  ] as const)("is around the query in a close-up: %j from %j", (sizes, query, frame) => {
    expect(frameOf(sizes, query, true)).toEqual(frame);
  });
});

test.each([
  [190, { rows: 1, columns: 400 }, LEAST_HEIGHT],
  [190, { rows: 1, columns: 64 }, LEAST_HEIGHT],
  [190, { rows: 16, columns: 16 }, 190],
  [190, { rows: 12, columns: 16 }, 143],
] as const)("a map of %i px and %j is %i px high", (width, frame, height) => {
  expect(heightOf(width, frame)).toBe(height);
});
