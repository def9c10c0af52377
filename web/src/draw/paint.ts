/** Numbers on a canvas, one canvas pixel for each, none for NaN; CSS makes it large without smoothing. */
import type { Plane } from "../core/convolution";
import { type Scale, table } from "./colours";

export function paint(canvas: HTMLCanvasElement, plane: Plane, scale: Scale, limits: readonly [number, number]): void {
  const context = canvas.getContext("2d");
  if (context === null) return;
  if (canvas.width !== plane.width || canvas.height !== plane.height) {
    canvas.width = plane.width;
    canvas.height = plane.height;
  }
  const picture = context.createImageData(plane.width, plane.height);
  const words = new Uint32Array(picture.data.buffer);
  const colours = new Uint32Array(table(scale).buffer);
  const [low, high] = limits;
  const factor = high > low ? 255 / (high - low) : 0;
  for (let index = 0; index < words.length; index++) {
    const value = plane.data[index]!;
    if (Number.isNaN(value)) continue; // transparent
    const step = Math.round((value - low) * factor);
    words[index] = colours[Math.min(Math.max(step, 0), 255)]!;
  }
  context.putImageData(picture, 0, 0);
}
