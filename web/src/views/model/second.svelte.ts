/** The second model of a comparison. It stays open while the visitor looks at other views. */
import type { Payload } from "../../core/payload";

let open = $state.raw<Payload | null>(null);

export const second = {
  get payload(): Payload | null {
    return open;
  },
  set payload(payload: Payload | null) {
    open = payload;
  },
};
