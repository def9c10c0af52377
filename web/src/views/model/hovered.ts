/** The head under the pointer, in a map, a plane or a table. */
export interface Hovered {
  /** 0 for the first model, 1 for the second. */
  readonly which: number;
  readonly layer: number;
  readonly head: number;
  /** (row, column) of the token under the pointer, on the layer's grid; null in planes and tables, and outside the image. */
  readonly key: readonly [number, number] | null;
}

/** Name of a head, for comparisons. */
export const headKey = ({ which, layer, head }: Omit<Hovered, "key">): string => `${which}.${layer}.${head}`;
