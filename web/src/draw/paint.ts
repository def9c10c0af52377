/** Painting of a plane on a canvas, one canvas pixel per value; CSS enlarges it without smoothing. */
import type { Plane } from "../core/convolution";
import { type Scale, table } from "./colours";

/** Paint a plane. NaN is transparent, and if the limits are equal all values have a neutral colour. */
export function paint(canvas: HTMLCanvasElement, plane: Plane, scale: Scale, limits: readonly [number, number]): void {
  const context = sized(canvas, plane);
  if (context === null) return;
  const picture = context.createImageData(plane.width, plane.height);
  const words = new Uint32Array(picture.data.buffer);
  const colours = new Uint32Array(table(scale).buffer);
  const [low, high] = limits;
  const factor = high > low ? 255 / (high - low) : 0;
  const lowest = high > low || scale === "amount" ? 0 : 128;
  for (let index = 0; index < words.length; index++) {
    const value = plane.data[index]!;
    if (Number.isNaN(value)) continue;
    const step = Math.round((value - low) * factor) + lowest;
    words[index] = colours[Math.min(Math.max(step, 0), 255)]!;
  }
  context.putImageData(picture, 0, 0);
}

/** Paint RGBA pixels. */
export function paintColours(canvas: HTMLCanvasElement, size: Size, colours: Uint8ClampedArray): void {
  sized(canvas, size)?.putImageData(new ImageData(new Uint8ClampedArray(colours), size.width, size.height), 0, 0);
}

type Size = Pick<Plane, "height" | "width">;

function sized(canvas: HTMLCanvasElement, { height, width }: Size): CanvasRenderingContext2D | null {
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
  }
  return canvas.getContext("2d");
}
