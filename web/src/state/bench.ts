/** State of the theorem workbench, and its example settings. */
import { BORDERS } from "../core/grid";
import { KERNELS } from "../core/kernels";
import { PHOTOGRAPHS, SIZES } from "../core/photographs";
import { clamped } from "./slice";

export interface BenchState {
  /** Name of a kernel, or "free" for the weights in `taps`. */
  readonly kernel: string;
  /** 3 or 5 taps along each axis. */
  readonly width: number;
  readonly taps: readonly number[];
  /** Name of a photograph, or "own" for the visitor's image. */
  readonly picture: string;
  /** Pixels along each side of a photograph. */
  readonly size: number;
  /** Sharpness of the heads in 1 / pixel^2. */
  readonly alpha: number;
  /** Offset of each centre from its tap, (row, column) pairs in pixels; empty if all are 0. */
  readonly offsets: readonly number[];
  /** Removed heads. */
  readonly missing: readonly number[];
  readonly border: string;
  readonly stride: number;
  readonly dilation: number;
  readonly head: number;
  /** (row, column) among the queries. */
  readonly query: readonly number[];
  /** Whether the query is locked: it then ignores pointer movements. */
  readonly frozen: boolean;
}

export const BENCH: BenchState = {
  kernel: "sharpen",
  width: 3,
  taps: [],
  picture: "cat",
  size: 48,
  alpha: 2,
  offsets: [],
  missing: [],
  border: "renormalise",
  stride: 1,
  dilation: 1,
  head: 3,
  query: [16, 20],
  frozen: false,
};

export const ALPHA = { low: 0.1, high: 50, hard: 40, trained: 1 } as const;
/** Largest offset of a centre from its tap along an axis, in pixels. */
export const FARTHEST = 3;
const LARGEST_WEIGHT = 100;
const LARGEST_IMAGE = 64;

/** Example offsets of 25 heads, (row, column) pairs of up to 0.33 pixels. They are typical of trained heads, but not measured. */
const TRAINED = [
  0.21, -0.12, -0.08, 0.3, 0.15, 0.05, -0.27, 0.18, 0.06, -0.04, 0.11, -0.33, -0.19, 0.22, 0.31, -0.09, -0.14, -0.24,
  0.09, 0.17, -0.3, 0.02, 0.25, -0.16, 0.12, 0.28, -0.05, -0.21, 0.18, 0.07, -0.23, 0.13, 0.04, -0.29, 0.2, 0.1, -0.11,
  0.26, 0.29, -0.18, -0.02, 0.15, -0.26, -0.07, 0.16, 0.23, 0.08, -0.13, -0.2, 0.3,
];

/** Hard heads centred on their taps: attention equals the convolution. */
export const hard = (): Partial<BenchState> => ({ alpha: ALPHA.hard, offsets: [], missing: [] });

/** Soft heads with small offsets from their taps. */
export function asTrained(state: BenchState): Partial<BenchState> {
  return { alpha: ALPHA.trained, offsets: TRAINED.slice(0, 2 * state.width ** 2), missing: [] };
}

/** Hard heads with one removed. */
export const oneMissing = (head: number): Partial<BenchState> => ({ ...hard(), missing: [head] });

/** Restrict a state from a link or an input field to valid values. */
export function checkedBench(state: BenchState): BenchState {
  const width = state.width === 5 ? 5 : 3;
  const heads = width ** 2;
  const kernel = oneOf([...KERNELS, "free"], state.kernel, BENCH.kernel);
  const size = SIZES.find((known) => known === state.size) ?? BENCH.size;
  const kept = <T>(list: readonly T[], length: number): readonly T[] => (list.length === length ? list : []);
  return {
    ...state,
    kernel: kernel === "free" && state.taps.length !== heads ? BENCH.kernel : kernel,
    width,
    taps: kept(state.taps, heads).map((weight) => clamped(weight, -LARGEST_WEIGHT, LARGEST_WEIGHT)),
    picture: oneOf([...PHOTOGRAPHS, "own"], state.picture, BENCH.picture),
    size,
    alpha: clamped(state.alpha, ALPHA.low, ALPHA.high),
    offsets: kept(state.offsets, 2 * heads).map((offset) => clamped(offset, -FARTHEST, FARTHEST)),
    missing: state.missing.filter((head) => Number.isInteger(head) && head >= 0 && head < heads),
    border: oneOf(BORDERS, state.border, BENCH.border),
    stride: clamped(state.stride, 1, 3, 1),
    dilation: clamped(state.dilation, 1, 3, 1),
    head: clamped(state.head, 0, heads - 1, 1),
    query: [0, 1].map((axis) => clamped(state.query[axis] ?? 0, 0, LARGEST_IMAGE - 1, 1)),
  };
}

function oneOf(known: readonly string[], given: string, standard: string): string {
  return known.includes(given) ? given : standard;
}
