import { expect, test } from "vitest";
import { brightnessOf, legendMarks, scoreBrightness } from "../src/draw/attentionScale";
import { paint, paintAttention } from "../src/draw/paint";
import { table } from "../src/draw/colours";

test("uniform attention is dark, all attention on one token is brightest, and the scale is logarithmic", () => {
  const brightness = brightnessOf(64, 64);
  expect([0, 1 / 128, 1 / 64, 1 / 8, 1].map(brightness)).toEqual([0, 0, 0, 0.5, 1]);
  expect(brightnessOf(16, 256)(1)).toBeCloseTo(0.5, 12); // a coarser layer of the same payload
  expect(brightnessOf(1, 1)(1)).toBe(0);
});

test("scores have the colours of their probabilities", () => {
  expect([-99, 0, Math.log(8), Math.log(64), 99].map(scoreBrightness(64))).toEqual([0, 0, 0.5, 1, 1]);
});

test("the legend has powers of 4 and the end", () => {
  expect(legendMarks(64).map(({ times }) => times)).toEqual([1, 4, 16, 64]);
  expect(legendMarks(196).map(({ times }) => times)).toEqual([1, 4, 16, 64, 196]);
  expect(legendMarks(576).map(({ times }) => times)).toEqual([1, 4, 16, 64, 576]);
  expect(legendMarks(1024).at(-1)).toEqual({ times: 1024, at: 1 });
  expect(legendMarks(1)).toEqual([{ times: 1, at: 0 }]);
});

/** The colours, as steps of a scale, that a painter puts on a canvas of one row. */
function painted(draw: (canvas: HTMLCanvasElement) => void, scale: "amount" | "signed"): number[] {
  let words: ArrayLike<number> = [];
  const context = {
    createImageData: (width: number, height: number) => ({ data: new Uint8ClampedArray(4 * width * height) }),
    putImageData: ({ data }: { data: Uint8ClampedArray }) => (words = new Uint32Array(data.buffer)),
  };
  draw({ width: 0, height: 0, getContext: () => context } as unknown as HTMLCanvasElement);
  const colours = new Uint32Array(table(scale).buffer);
  return Array.from(words, (word) => colours.indexOf(word));
}

const row = (...data: number[]) => ({ height: 1, width: data.length, data: Float64Array.from(data) });

test("zero has the middle colour of a signed scale, whatever the limits", () => {
  const steps = (limits: [number, number], ...data: number[]) => painted((canvas) => paint(canvas, row(...data), "signed", limits), "signed");
  expect(steps([0, 0], 0, 0)).toEqual([128, 128]);
  expect(steps([-1, 1], -1, 0, 1)).toEqual([0, 128, 255]);
  expect(steps([0, 2], 0, 2)).toEqual([128, 255]);
  expect(steps([-1e-17, 1e-17], 0)).toEqual([128]);
});

test("a uniform map of attention is dark, also at a border without tokens", () => {
  const steps = painted((canvas) => paintAttention(canvas, row(NaN, 0.25, 0.25, 0.25, 0.25)), "amount");
  expect(steps.slice(1)).toEqual([0, 0, 0, 0]);
  expect(painted((canvas) => paintAttention(canvas, row(1, 0)), "amount")).toEqual([255, 0]);
});
