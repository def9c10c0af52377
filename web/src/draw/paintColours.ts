/** Paint RGBA pixels on a canvas, one canvas pixel per pixel. */
export function paintColours(canvas: HTMLCanvasElement, [height, width]: readonly [number, number], colours: Uint8ClampedArray): void {
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
  }
  canvas.getContext("2d")?.putImageData(new ImageData(new Uint8ClampedArray(colours), width, height), 0, 0);
}
