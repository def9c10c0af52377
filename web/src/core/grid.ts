/**
 * One axis of a grid, as defined by `attnconv.grid`.
 *
 * Keys are at positions 0 .. size - 1, query i is at stride * i. A shift is key position minus query position. The
 * lattice consists of all positions in the softmax: only the keys for `renormalise`, keys and padding otherwise. Padding
 * contains zeros (`zero`) or copies of keys (`replicate`, `reflect`, `circular`).
 */
export const BORDERS = ["renormalise", "zero", "replicate", "reflect", "circular"] as const;
export type Border = (typeof BORDERS)[number];

export interface Axis {
  readonly size: number;
  readonly queries: number;
  readonly stride: number;
  readonly padding: number;
  readonly border: Border;
}

/** Geometry of a convolution with odd kernel size K, padded so that stride 1 keeps the image's size. */
export interface Geometry {
  readonly width: number;
  readonly stride: number;
  readonly dilation: number;
  readonly border: Border;
}

/** Return the padding on each side that centres the kernel on its query. */
export const reach = (geometry: Geometry): number => (geometry.dilation * (geometry.width - 1)) / 2;

/** Return the axis for `size` pixels, with ceil(size / stride) queries. */
export function axisOf(size: number, geometry: Geometry): Axis {
  const { stride, border } = geometry;
  return { size, queries: Math.ceil(size / stride), stride, padding: reach(geometry), border };
}

/** Return the shifts of the kernel's K * K taps, row-major: dilation * index - padding. */
export function tapShifts(geometry: Geometry): [number, number][] {
  const along = Array.from({ length: geometry.width }, (_, index) => geometry.dilation * index - reach(geometry));
  return along.flatMap((row) => along.map((column): [number, number] => [row, column]));
}

export const latticeStart = (axis: Axis): number => (axis.border === "renormalise" ? 0 : -axis.padding);

export function latticeSize(axis: Axis): number {
  return axis.border === "renormalise" ? axis.size : axis.size + 2 * axis.padding;
}

/** Return the key at a lattice position; -1 for zeros. */
export function source(axis: Axis, position: number): number {
  const { size, border } = axis;
  if (border === "renormalise" || border === "zero") return position >= 0 && position < size ? position : -1;
  if (border === "replicate") return Math.min(Math.max(position, 0), size - 1);
  if (border === "circular") return modulo(position, size);
  const period = Math.max(2 * (size - 1), 1);
  const mirrored = modulo(position, period);
  return mirrored < size ? mirrored : period - mirrored;
}

function modulo(value: number, period: number): number {
  return ((value % period) + period) % period;
}
