import type { Plane } from "../../core/convolution";
import { greyOf } from "../../draw/opened";

/** The picture that the visitor opened. It is data, not state: no link can restore it. */
export const own = $state<{ plane: Plane | null; name: string }>({ plane: null, name: "" });

/** Makes a file the visitor's picture, or throws words that say why it cannot be. */
export async function openOwn(file: File): Promise<void> {
  own.plane = await greyOf(file);
  own.name = file.name;
}
