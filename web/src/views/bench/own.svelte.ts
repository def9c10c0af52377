import type { Plane } from "../../core/convolution";

/** The picture that the visitor opened. It is data, not state: no link can restore it. */
export const own = $state<{ plane: Plane | null; name: string }>({ plane: null, name: "" });
