/** For tests in a browser: the page's own functions, held to the library's numbers where they will run. */
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

/** How far this browser's numbers are from those of a fixture. */
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

/** The same for one row of a payload, whose bytes come as a list. */
function rowApart(bytes: number[], { place, part, row }: { place: Place; part: Part; row: number[] }): number {
  const into = new Float64Array(row.length);
  return writeRow(openPayload(Uint8Array.from(bytes).buffer), place, part, into) ? most(into, row) : Infinity;
}

function most(left: ArrayLike<number>, right: readonly number[]): number {
  if (left.length !== right.length) return Infinity;
  return right.reduce((found, value, index) => Math.max(found, Math.abs(value - left[index]!)), 0);
}

Object.assign(globalThis, { attnconv: { apart, rowApart } });
