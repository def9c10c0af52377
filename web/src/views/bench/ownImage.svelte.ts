import type { Plane } from "../../core/convolution";
import { greyOf } from "../../draw/imageFile";

/** The visitor's image. It is data, not state: a link cannot restore it. */
export const own = $state<{ plane: Plane | null; name: string }>({ plane: null, name: "" });

/** Decode a file as the visitor's image. Errors have a message for the visitor. */
export async function openOwn(file: File): Promise<void> {
  own.plane = await greyOf(file);
  own.name = file.name;
}
