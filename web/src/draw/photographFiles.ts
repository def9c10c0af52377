/** Decoding of the page's photographs. */
import { PHOTOGRAPHS, fileOf, keep } from "../core/photographs";
import { pixelsOf } from "./imageFile";

export async function decodePhotographs(): Promise<void> {
  await Promise.all(
    PHOTOGRAPHS.map(async (name) => {
      const bitmap = await createImageBitmap(fileOf(name));
      keep(name, pixelsOf(bitmap, bitmap.height, bitmap.width));
    }),
  );
}
