import type { Photograph } from "../../core/photographs";
import { photographOf } from "../../draw/imageFile";

/** The visitor's image. It is data, not state: a link cannot restore it. */
export const own = $state<{ plane: Photograph | null; name: string }>({ plane: null, name: "" });

/** Decode a file as the visitor's image. Errors have a message for the visitor. */
export async function openOwn(file: File): Promise<void> {
  own.plane = await photographOf(file);
  own.name = file.name;
}
