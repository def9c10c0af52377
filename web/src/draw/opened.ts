/** A picture that the visitor opened or dropped, as grey values of at most 64 x 64 pixels. Nothing leaves the page. */
import type { Plane } from "../core/convolution";

const LARGEST_FILE = 20 * 2 ** 20;
const MOST = 64;
const LEAST = 8; // the mirrored border of a dilated 5 x 5 kernel wants 7

export async function greyOf(file: Blob): Promise<Plane> {
  if (file.size > LARGEST_FILE) throw new Error(`The picture must be under 20 MB, got ${Math.ceil(file.size / 1e6)} MB.`);
  let bitmap: ImageBitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error("The file must be a picture that this browser can read, such as PNG, JPEG, WebP or GIF.");
  }
  const shrink = Math.min(1, MOST / Math.max(bitmap.width, bitmap.height));
  const sized = (extent: number): number => Math.min(MOST, Math.max(LEAST, Math.round(extent * shrink)));
  const [width, height] = [sized(bitmap.width), sized(bitmap.height)];
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  if (context === null) throw new Error("The browser gave no canvas to read the picture with.");
  context.imageSmoothingQuality = "high";
  context.fillStyle = "white"; // under transparent pictures
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  const bytes = context.getImageData(0, 0, width, height).data;
  const data = Float64Array.from({ length: width * height }, (_, pixel) => luminance(bytes, 4 * pixel) / 255);
  return { height, width, data };
}

/** Brightness by Rec. 601. */
function luminance(bytes: Uint8ClampedArray, at: number): number {
  return Math.round(0.299 * bytes[at]! + 0.587 * bytes[at + 1]! + 0.114 * bytes[at + 2]!);
}
