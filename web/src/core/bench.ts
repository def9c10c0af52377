/** Computations of the theorem workbench: from its state to the image, the outputs, their difference and the bound. */
import type { BenchState } from "../state/bench";
import { type Bound, errorBound } from "./bounds";
import { type Plane, convolve, difference, largest, range } from "./convolution";
import { type Border, type Geometry, tapShifts } from "./grid";
import { type KernelName, kernelNamed } from "./kernels";
import { type Photograph, type PhotographName, photographNamed } from "./photographs";
import { type Heads, attend } from "./theorem";

export interface Setup {
  readonly image: Photograph;
  readonly geometry: Geometry;
  readonly kernel: readonly number[];
  readonly shifts: readonly [number, number][];
  readonly heads: Heads;
}

export interface Result {
  readonly attention: Plane;
  readonly convolution: Plane;
  readonly difference: Plane;
  /** The largest |difference|. */
  readonly error: number;
  readonly bound: Bound;
  /** Smallest and largest value of the convolution: the colour scale of both outputs, which does not change with the heads. */
  readonly outputs: readonly [number, number];
  /** Largest |value| of the convolution: the colour scale of the difference, which therefore fades as heads sharpen. */
  readonly scale: number;
}

/** Return a key of the state that changes exactly when the outputs must be recomputed. */
export function decisive(state: BenchState): string {
  const { head: _head, query: _query, frozen: _frozen, ...rest } = state;
  return JSON.stringify(rest);
}

export function kernelOf(state: BenchState): readonly number[] {
  return state.kernel === "free" ? state.taps : kernelNamed(state.kernel as KernelName, state.width);
}

export function setup(state: BenchState, own: Photograph | null): Setup {
  const geometry: Geometry = {
    width: state.width,
    stride: state.stride,
    dilation: state.dilation,
    border: state.border as Border,
  };
  const shifts = tapShifts(geometry);
  const centres = shifts.map(([row, column], head): [number, number] => [
    row + (state.offsets[2 * head] ?? 0),
    column + (state.offsets[2 * head + 1] ?? 0),
  ]);
  const kernel = kernelOf(state);
  const present = shifts.map((_, head) => !state.missing.includes(head));
  const named = state.picture === "own" ? "cat" : state.picture;
  const image = state.picture === "own" && own !== null ? own : photographNamed(named as PhotographName, state.size);
  return { image, geometry, kernel, shifts, heads: { alpha: state.alpha, centres, weights: kernel, present } };
}

export function result({ image, geometry, kernel, shifts, heads }: Setup): Result {
  const attention = attend(image, heads, geometry);
  const convolution = convolve(image, kernel, geometry);
  const apart = difference(attention, convolution);
  const [low, high] = range(image.data);
  return {
    attention,
    convolution,
    difference: apart,
    error: largest(apart),
    bound: errorBound(heads, shifts, { low, high }, geometry.border),
    outputs: range(convolution.data),
    scale: largest(convolution),
  };
}

/** Return the offsets with one head's offset replaced. */
export function moved(state: BenchState, head: number, offset: readonly [number, number]): readonly number[] {
  const offsets = state.offsets.length > 0 ? [...state.offsets] : new Array<number>(2 * state.width ** 2).fill(0);
  offsets[2 * head] = offset[0];
  offsets[2 * head + 1] = offset[1];
  return offsets.every((value) => value === 0) ? [] : offsets;
}

/** Choose the head to remove: the selected one, or the one with the largest weight if the selected head's weight is 0. */
export function headToMiss(state: BenchState): number {
  const sizes = kernelOf(state).map(Math.abs);
  return sizes[state.head] ? state.head : sizes.indexOf(Math.max(...sizes));
}
