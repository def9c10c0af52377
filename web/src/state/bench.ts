/** What the theorem bench shows, and its ready-made settings. */
import { BORDERS } from "../core/grid";
import { KERNELS } from "../core/kernels";
import { PICTURES, SIZES } from "../core/pictures";
import { clamped } from "./slice";

export interface BenchState {
  /** A kernel's name, or "free" for the weights in `taps`. */
  readonly kernel: string;
  /** 3 or 5 taps along each axis. */
  readonly width: number;
  readonly taps: readonly number[];
  /** A picture's name, or "own" for the one that the visitor opened. */
  readonly picture: string;
  /** Pixels along each side of a built-in picture. */
  readonly size: number;
  /** Sharpness of the heads in 1 / pixel^2. */
  readonly alpha: number;
  /** How far each centre lies from its tap, (row, column) pairs in pixels; empty for nowhere. */
  readonly offsets: readonly number[];
  /** Heads that are taken out. */
  readonly missing: readonly number[];
  readonly border: string;
  readonly stride: number;
  readonly dilation: number;
  readonly head: number;
  /** (row, column) among the queries. */
  readonly query: readonly number[];
  /** Whether the query stays where it is when the pointer moves. */
  readonly frozen: boolean;
  /** Whether the difference is drawn on a scale of its own, or on that of the outputs. */
  readonly ownScale: boolean;
}

export const BENCH: BenchState = {
  kernel: "sharpen",
  width: 3,
  taps: [],
  picture: "disc",
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
  ownScale: true,
};

export const ALPHA = { low: 0.1, high: 50, hard: 40, trained: 1 } as const;
/** How far a centre may be moved from its tap, in pixels. */
export const FARTHEST = 3;
const LARGEST_WEIGHT = 100;
const LARGEST_IMAGE = 64;

/** Offsets of 25 heads as small trainings leave them: a few tenths of a pixel, (row, column) pairs. Fixed, not measured. */
const TRAINED = [
  0.21, -0.12, -0.08, 0.3, 0.15, 0.05, -0.27, 0.18, 0.06, -0.04, 0.11, -0.33, -0.19, 0.22, 0.31, -0.09, -0.14, -0.24,
  0.09, 0.17, -0.3, 0.02, 0.25, -0.16, 0.12, 0.28, -0.05, -0.21, 0.18, 0.07, -0.23, 0.13, 0.04, -0.29, 0.2, 0.1, -0.11,
  0.26, 0.29, -0.18, -0.02, 0.15, -0.26, -0.07, 0.16, 0.23, 0.08, -0.13, -0.2, 0.3,
];

/** Hard heads on their taps: attention is the convolution. */
export const hard = (): Partial<BenchState> => ({ alpha: ALPHA.hard, offsets: [], missing: [] });

/** Soft heads a little beside their taps. */
export function asTrained(state: BenchState): Partial<BenchState> {
  return { alpha: ALPHA.trained, offsets: TRAINED.slice(0, 2 * state.width ** 2), missing: [] };
}

/** Hard heads of which one is taken out. */
export const oneMissing = (head: number): Partial<BenchState> => ({ ...hard(), missing: [head] });

/** A state that came from a link or a field, made legal. */
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
    picture: oneOf([...PICTURES, "own"], state.picture, BENCH.picture),
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
