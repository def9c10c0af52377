/** Decoding of the visitor's image files, at most 64 x 64 pixels. Nothing leaves the page. */
import { type Photograph, withGreys } from "../core/photographs";

const LARGEST_FILE = 20 * 2 ** 20;
const MOST = 64;
const LEAST = 8; // the `reflect` border of a 5 x 5 kernel with dilation 3 needs 7

export async function photographOf(file: Blob): Promise<Photograph> {
  if (file.size > LARGEST_FILE) throw new Error(`The image must have at most 20 MiB, got ${Math.ceil(file.size / 2 ** 20)} MiB.`);
  let bitmap: ImageBitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error("The file must be an image that this browser can read, such as PNG, JPEG, WebP or GIF.");
  }
  const shrink = Math.min(1, MOST / Math.max(bitmap.width, bitmap.height));
  const sized = (extent: number): number => Math.min(MOST, Math.max(LEAST, Math.round(extent * shrink)));
  const [height, width] = [sized(bitmap.height), sized(bitmap.width)];
  return withGreys(pixelsOf(bitmap, height, width), height, width);
}

/** Return the RGBA pixels of a bitmap on a white background, scaled to height x width; the bitmap is closed. */
export function pixelsOf(bitmap: ImageBitmap, height: number, width: number): Uint8ClampedArray {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  if (context === null) throw new Error("The browser could not create a canvas to read the image.");
  context.imageSmoothingQuality = "high";
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  return context.getImageData(0, 0, width, height).data;
}
