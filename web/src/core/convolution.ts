/**
 * Convolution (cross-correlation, as in PyTorch's Conv2d), tap by tap:
 *
 *     out[i, j] = sum over taps (a, b) of kernel[a, b] * x[stride i + dilation a - padding, stride j + dilation b - padding]
 *
 * The border rule defines x outside the image. `renormalise` is a rule of the softmax: hard heads with integer centres
 * then attend to the nearest pixel inside, which is replicate padding, so replicate padding is used here.
 */
import { type Axis, type Geometry, axisOf, source, tapShifts } from "./grid";

/** A grey image or an output, row-major. */
export interface Plane {
  readonly height: number;
  readonly width: number;
  readonly data: Float64Array;
}

export function convolve(image: Plane, kernel: readonly number[], geometry: Geometry): Plane {
  const padded: Geometry = { ...geometry, border: geometry.border === "renormalise" ? "replicate" : geometry.border };
  const rows = axisOf(image.height, padded);
  const columns = axisOf(image.width, padded);
  const data = new Float64Array(rows.queries * columns.queries);
  tapShifts(padded).forEach(([down, right], tap) => {
    const weight = kernel[tap] ?? 0;
    if (weight === 0) return;
    const fromRow = sources(rows, down);
    const fromColumn = sources(columns, right);
    for (let i = 0; i < rows.queries; i++) {
      const row = fromRow[i]!;
      if (row < 0) continue;
      for (let j = 0; j < columns.queries; j++) {
        const column = fromColumn[j]!;
        if (column >= 0) data[i * columns.queries + j]! += weight * image.data[row * image.width + column]!;
      }
    }
  });
  return { height: rows.queries, width: columns.queries, data };
}

/** Return the key at a shift from every query; -1 for zeros. */
function sources(axis: Axis, shift: number): Int32Array {
  return Int32Array.from({ length: axis.queries }, (_, query) => source(axis, query * axis.stride + shift));
}

/** Return the smallest and the largest entry. */
export function range(values: ArrayLike<number>): [number, number] {
  let low = Infinity;
  let high = -Infinity;
  for (let index = 0; index < values.length; index++) {
    low = Math.min(low, values[index]!);
    high = Math.max(high, values[index]!);
  }
  return [low, high];
}

export function difference(left: Plane, right: Plane): Plane {
  return { ...left, data: left.data.map((value, index) => value - right.data[index]!) };
}

/** Return the largest |entry|. */
export function largest(plane: Plane): number {
  return plane.data.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
}
