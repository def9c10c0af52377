/** Hooks for the browser tests: they compare the page's own functions with the library's numbers. */
import { errorBound } from "./core/bounds";
import { convolve, range } from "./core/convolution";
import { type Geometry, tapShifts } from "./core/grid";
import { openPayload } from "./core/payload";
import { type Part, type Place, writeRow } from "./core/rows";
import { type Heads, attend } from "./core/theorem";

interface Case {
  geometry: Geometry;
  alpha: number;
  image: { height: number; width: number; data: number[] };
  kernel: number[];
  centres: [number, number][];
  attention: number[];
  convolution: number[];
  bound: number;
}

/** Compute the largest differences between this browser's numbers and a fixture's. */
function apart(given: Case): Record<string, number> {
  const image = { ...given.image, data: Float64Array.from(given.image.data) };
  const heads: Heads = { ...given, weights: given.kernel, present: given.kernel.map(() => true) };
  const [low, high] = range(image.data);
  const bound = errorBound(heads, tapShifts(given.geometry), { low, high }, given.geometry.border);
  return {
    attention: most(attend(image, heads, given.geometry).data, given.attention),
    convolution: most(convolve(image, given.kernel, given.geometry).data, given.convolution),
    bound: Math.abs(bound.total / given.bound - 1),
  };
}

/** The same for one row of a payload, given as a list of bytes. */
function rowApart(bytes: number[], { place, part, row }: { place: Place; part: Part; row: number[] }): number {
  const into = new Float64Array(row.length);
  return writeRow(openPayload(Uint8Array.from(bytes).buffer), place, part, into) ? most(into, row) : Infinity;
}

function most(left: ArrayLike<number>, right: readonly number[]): number {
  if (left.length !== right.length) return Infinity;
  return right.reduce((found, value, index) => Math.max(found, Math.abs(value - left[index]!)), 0);
}

Object.assign(globalThis, { attnconv: { apart, rowApart } });
