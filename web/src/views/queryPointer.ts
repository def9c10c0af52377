import { queryIn } from "../core/maps";
import type { How } from "./gridPointer";

/** A query, and whether it is locked. */
export interface Pointed {
  /** (row, column) among the queries. */
  readonly query: readonly number[];
  readonly frozen: boolean;
}

/** Pointer and keyboard actions that move and lock a query. */
export interface Pointing {
  readonly point: (row: number, column: number, how: How) => void;
  readonly step: (down: number, right: number) => void;
  readonly freeze: () => void;
}

export const HINT = "Arrow keys move the query, by 5 with Shift. Enter locks it.";

/** Return the actions for an image; `stride` is the distance of neighbouring queries in pixels. */
export function pointing(
  state: Pointed,
  change: (changed: Partial<Pointed>) => void,
  { sizes, stride = 1 }: { sizes: readonly [number, number]; stride?: number },
): Pointing {
  const query = queryIn(state.query, sizes);
  const freeze = (): void => change({ frozen: !state.frozen });
  const to = (at: number, by: number, size: number): number => Math.min(Math.max(at + by, 0), size - 1);
  return {
    freeze,
    step: (down, right) => change({ query: [to(query[0], down, sizes[0]), to(query[1], right, sizes[1])] }),
    point: (row, column, how) => {
      if (how === "press") freeze();
      if (how !== "hover" || !state.frozen) change({ query: [row, column].map((at) => Math.max(0, Math.floor(at / stride))) });
    },
  };
}
