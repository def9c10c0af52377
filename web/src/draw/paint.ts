/** Painting of a plane on a canvas, one canvas pixel per value; CSS enlarges it without smoothing. */
import type { Plane } from "../core/convolution";
import { brightnessOf } from "./attentionScale";
import { type Scale, table } from "./colours";

/**
 * Paint a plane; NaN is transparent. With the scale `signed`, zero always has the middle colour, and the limit with the
 * larger absolute value has the colour of an end.
 */
export function paint(canvas: HTMLCanvasElement, plane: Plane, scale: Scale, limits: readonly [number, number]): void {
  const far = Math.max(Math.abs(limits[0]), Math.abs(limits[1]));
  const [low, high] = scale === "signed" ? [-far, far] : limits;
  if (high > low) paintSteps(canvas, plane, scale, (value) => (value - low) / (high - low));
  else paintSteps(canvas, plane, scale, () => (scale === "amount" ? 0 : 0.5));
}

/**
 * Paint probabilities by "times uniform" (see `attentionScale`). NaN is transparent and is no token; `tokens` is the number
 * of tokens if the plane is a part of the map.
 */
export function paintAttention(canvas: HTMLCanvasElement, plane: Plane, finest?: number, tokens?: number): void {
  const count = tokens ?? plane.data.reduce((sum, value) => sum + (Number.isNaN(value) ? 0 : 1), 0);
  paintSteps(canvas, plane, "amount", brightnessOf(count, finest ?? count));
}

/** Paint a plane with colours chosen by a function to [0, 1]. */
function paintSteps(canvas: HTMLCanvasElement, plane: Plane, scale: Scale, place: (value: number) => number): void {
  const context = canvas.getContext("2d");
  if (context === null) return;
  if (canvas.width !== plane.width || canvas.height !== plane.height) {
    canvas.width = plane.width;
    canvas.height = plane.height;
  }
  const picture = context.createImageData(plane.width, plane.height);
  const words = new Uint32Array(picture.data.buffer);
  const colours = new Uint32Array(table(scale).buffer);
  for (let index = 0; index < words.length; index++) {
    const value = plane.data[index]!;
    if (Number.isNaN(value)) continue;
    words[index] = colours[Math.round(255 * Math.min(Math.max(place(value), 0), 1))]!;
  }
  context.putImageData(picture, 0, 0);
}
