/** Decoding of the visitor's image files to grey values, at most 64 x 64 pixels. Nothing leaves the page. */
import type { Plane } from "../core/convolution";

const LARGEST_FILE = 20 * 2 ** 20;
const MOST = 64;
const LEAST = 8; // the `reflect` border of a 5 x 5 kernel with dilation 3 needs 7

export async function greyOf(file: Blob): Promise<Plane> {
  if (file.size > LARGEST_FILE) throw new Error(`The image must have at most 20 MiB, got ${Math.ceil(file.size / 2 ** 20)} MiB.`);
  let bitmap: ImageBitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error("The file must be an image that this browser can read, such as PNG, JPEG, WebP or GIF.");
  }
  const shrink = Math.min(1, MOST / Math.max(bitmap.width, bitmap.height));
  const sized = (extent: number): number => Math.min(MOST, Math.max(LEAST, Math.round(extent * shrink)));
  const [width, height] = [sized(bitmap.width), sized(bitmap.height)];
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  if (context === null) throw new Error("The browser could not create a canvas to read the image.");
  context.imageSmoothingQuality = "high";
  context.fillStyle = "white"; // background of transparent images
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  const bytes = context.getImageData(0, 0, width, height).data;
  const data = Float64Array.from({ length: width * height }, (_, pixel) => luminance(bytes, 4 * pixel) / 255);
  return { height, width, data };
}

/** Compute the luma of a pixel (Rec. 601). */
function luminance(bytes: Uint8ClampedArray, at: number): number {
  return Math.round(0.299 * bytes[at]! + 0.587 * bytes[at + 1]! + 0.114 * bytes[at + 2]!);
}
