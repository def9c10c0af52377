/** For tests in a browser: the page's own functions, held to the library's numbers where they will run. */
import { errorBound } from "./core/bounds";
import { convolve, range } from "./core/convolution";
import { type Geometry, tapShifts } from "./core/grid";
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

function most(left: ArrayLike<number>, right: readonly number[]): number {
  if (left.length !== right.length) return Infinity;
  return right.reduce((found, value, index) => Math.max(found, Math.abs(value - left[index]!)), 0);
}

Object.assign(globalThis, { attnconv: { apart } });
