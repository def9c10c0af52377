/** Painting of a payload's images on a canvas, one canvas pixel per image pixel. */
import type { Tensor } from "../core/safetensors";

/** Paint one image, or the mean of all. */
export function paintPicture(canvas: HTMLCanvasElement, images: Tensor, image: number, mean: boolean): void {
  const [count, height, width] = images.shape as [number, number, number];
  const context = canvas.getContext("2d");
  if (context === null) return;
  [canvas.width, canvas.height] = [width, height];
  const picture = context.createImageData(width, height);
  const size = 3 * height * width;
  const chosen = mean ? Array.from({ length: count }, (_, index) => index) : [image];
  for (let at = 0, to = 0; at < size; at++, to++) {
    let sum = 0;
    for (const index of chosen) sum += images.data[index * size + at]!;
    picture.data[to] = sum / chosen.length;
    if (at % 3 === 2) picture.data[++to] = 255;
  }
  context.putImageData(picture, 0, 0);
}
