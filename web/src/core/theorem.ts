/**
 * Theorem 1 as a computation: K * K heads, each a Gaussian around one shift, form a K x K convolution.
 *
 *     score_h(delta) = -alpha |delta - centre_h|^2,     P_h = softmax over keys,     out = sum_h P_h X w_h
 *
 * The score is a sum over the two axes, so every P_h is exactly a Kronecker product of a row factor and a column factor,
 * under every border rule: two small matrices per head instead of one of size pixels x pixels.
 */
import type { Plane } from "./convolution";
import { type Axis, type Geometry, axisOf, latticeSize, latticeStart, source } from "./grid";

/** The heads of one layer, each with a centre and a weight; heads with `present` false are removed. */
export interface Heads {
  /** Sharpness in 1 / pixel^2. */
  readonly alpha: number;
  /** (row, column) in pixels from the query. */
  readonly centres: readonly (readonly [number, number])[];
  readonly weights: readonly number[];
  readonly present: readonly boolean[];
}

/** Weights this far below the nearest key's 1 do not change a float64 sum; skipping them leaves few keys for sharp heads. */
const NOTHING = 1e-20;

/** Probabilities of the image's keys along one axis, (queries, size), row-major; copies in the padding are added to their keys. */
export interface Factor {
  readonly queries: number;
  readonly size: number;
  readonly data: Float64Array;
}

export function axisFactor(axis: Axis, alpha: number, centre: number): Factor {
  const data = new Float64Array(axis.queries * axis.size);
  for (let query = 0; query < axis.queries; query++) {
    fillRow(axis, query * axis.stride + centre, alpha, data.subarray(query * axis.size, (query + 1) * axis.size));
  }
  return { queries: axis.queries, size: axis.size, data };
}

/** Compute one row of a factor: the softmax of -alpha (key - target)^2 over the lattice, summed over the copies of each key. */
function fillRow(axis: Axis, target: number, alpha: number, into: Float64Array): void {
  const first = latticeStart(axis);
  const count = latticeSize(axis);
  // Scores relative to the lattice's nearest point: (k - t)^2 - (n - t)^2 = (k - n)(k + n - 2 t), without cancellation.
  const nearest = Math.min(Math.max(Math.round(target), first), first + count - 1);
  let total = 0;
  for (let key = first; key < first + count; key++) {
    const weight = Math.exp(-alpha * (key - nearest) * (key + nearest - 2 * target));
    if (weight < NOTHING) continue;
    const shown = source(axis, key);
    total += weight;
    if (shown >= 0) into[shown]! += weight;
  }
  for (let key = 0; key < into.length; key++) into[key]! /= total;
}

/** Compute the output of attention, sum_h P_h X w_h. */
export function attend(image: Plane, heads: Heads, geometry: Geometry): Plane {
  const rows = axisOf(image.height, geometry);
  const columns = axisOf(image.width, geometry);
  const known = new Map<string, Factor>();
  const factor = (name: string, axis: Axis, centre: number): Factor => {
    const key = `${name}${centre}`;
    const found = known.get(key) ?? axisFactor(axis, heads.alpha, centre);
    known.set(key, found);
    return found;
  };
  const upright = transposed(image);
  const half = new Float64Array(columns.queries * image.height);
  const data = new Float64Array(rows.queries * columns.queries);
  heads.centres.forEach(([down, right], head) => {
    const weight = heads.weights[head] ?? 0;
    if (weight === 0 || heads.present[head] === false) return;
    mixColumns(upright, factor("c", columns, right), half);
    mixRows(half, factor("r", rows, down), weight, data);
  });
  return { height: rows.queries, width: columns.queries, data };
}

/** Transpose an image, so that both products access contiguous memory. */
function transposed(image: Plane): Plane {
  const { height, width } = image;
  const data = Float64Array.from({ length: height * width }, (_, at) => image.data[(at % height) * width + Math.floor(at / height)]!);
  return { height: width, width: height, data };
}

/** Compute half = C X^T: (column queries, height). Keys with probability 0 are skipped: sharp heads have few others. */
function mixColumns(upright: Plane, columns: Factor, half: Float64Array): void {
  const height = upright.width;
  half.fill(0);
  for (let query = 0; query < columns.queries; query++) {
    for (let key = 0; key < columns.size; key++) {
      const share = columns.data[query * columns.size + key]!;
      if (share === 0) continue;
      for (let row = 0; row < height; row++) half[query * height + row]! += share * upright.data[key * height + row]!;
    }
  }
}

/** Compute out += weight * R half^T: (row queries, column queries). */
function mixRows(half: Float64Array, rows: Factor, weight: number, out: Float64Array): void {
  const { size, data } = rows;
  const width = half.length / size;
  for (let query = 0; query < rows.queries; query++) {
    const start = query * size;
    let [first, last] = [start, start + size - 1];
    while (first < last && data[first] === 0) first++;
    while (last > first && data[last] === 0) last--;
    for (let column = 0; column < width; column++) {
      const beside = column * size - start;
      let sum = 0;
      for (let key = first; key <= last; key++) sum += data[key]! * half[beside + key]!;
      out[query * width + column]! += weight * sum;
    }
  }
}

/** Compute one head's attention from a query, (row, column) among the queries, to every pixel of the image. */
export function attentionOf(
  sizes: readonly [number, number],
  query: readonly [number, number],
  heads: Heads,
  head: number,
  geometry: Geometry,
): Plane {
  const [height, width] = sizes;
  const [down, right] = heads.centres[head] ?? [0, 0];
  const rows = new Float64Array(height);
  const columns = new Float64Array(width);
  fillRow(axisOf(height, geometry), query[0] * geometry.stride + down, heads.alpha, rows);
  fillRow(axisOf(width, geometry), query[1] * geometry.stride + right, heads.alpha, columns);
  const data = new Float64Array(height * width);
  rows.forEach((row, i) => columns.forEach((column, j) => (data[i * width + j] = row * column)));
  return { height, width, data };
}

/** Cut out the part of a plane within `radius` pixels of a position; pixels outside the plane are NaN. */
export function around(plane: Plane, [row, column]: readonly [number, number], radius: number): Plane {
  const width = 2 * radius + 1;
  const data = new Float64Array(width * width).fill(NaN);
  for (let i = Math.max(0, row - radius); i <= Math.min(plane.height - 1, row + radius); i++) {
    for (let j = Math.max(0, column - radius); j <= Math.min(plane.width - 1, column + radius); j++) {
      data[(i - row + radius) * width + j - column + radius] = plane.data[i * plane.width + j]!;
    }
  }
  return { height: width, width, data };
}
