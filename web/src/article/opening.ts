/**
 * The opening: nine heads drift from random places into the 3 x 3 grid of a kernel's taps, and sharpen.
 *
 *     centre_h(t) = tap_h + (1 - e(t)) R(t) (start_h - tap_h),     alpha(t) = low (high / low)^t,     0 <= t <= 1
 *
 * where e eases in and out, and R turns the heads while they drift. At t = 1, attention equals the convolution.
 */
import { type Setup, setup } from "../core/bench";
import type { KernelName } from "../core/kernels";
import type { PhotographName } from "../core/photographs";
import { ALPHA, BENCH } from "../state/bench";
import { uniform } from "./examples";

export interface Round {
  readonly kernel: KernelName;
  readonly picture: PhotographName;
  /** (row, column) of the pixel around which the heads are shown. */
  readonly query: readonly [number, number];
  /** Initial centre of each head, (row, column) in pixels from the query. */
  readonly starts: readonly (readonly [number, number])[];
}

const SHOWN: readonly Omit<Round, "starts">[] = [
  { kernel: "emboss", picture: "cat", query: [24, 23] },
  { kernel: "edge", picture: "coffee", query: [24, 28] },
  { kernel: "sharpen", picture: "astronaut", query: [27, 32] },
  { kernel: "box", picture: "cat", query: [29, 53] },
];
export const ROUNDS = SHOWN.length;
/** Seconds of the motion, and of the rest after it. */
export const SECONDS = { motion: 6, rest: 3 } as const;
export const SIZE = 64;
const HEADS = 9;
const NEAREST = 4; // pixels
const FARTHEST = 11;
const SOFTEST = 0.12;
const TURN = 1.6; // radians

/** Return a round's kernel, photograph and random initial centres. */
export function roundOf(number: number): Round {
  const next = uniform(number + 1);
  const first = next();
  const starts = Array.from({ length: HEADS }, (_, head): [number, number] => {
    // Spread over all directions, so that no two heads begin at the same place.
    const angle = 2 * Math.PI * (first + (((head * 4) % HEADS) + 0.7 * next()) / HEADS);
    const far = NEAREST + (FARTHEST - NEAREST) * next();
    return [far * Math.sin(angle), far * Math.cos(angle)];
  });
  return { ...SHOWN[number % ROUNDS]!, starts };
}

/** Return the layer at a time between 0 (random heads) and 1 (equal to the convolution). */
export function layerAt({ kernel, picture, starts }: Round, time: number): Setup {
  const left = 1 - eased(Math.min(1, time / 0.6)); // the centres arrive before the heads are sharp
  const [sine, cosine] = [Math.sin(TURN * left), Math.cos(TURN * left)];
  const offsets = starts.flatMap(([row, column], head) => {
    const [down, right] = [row - (Math.floor(head / 3) - 1), column - ((head % 3) - 1)];
    return [left * (cosine * down - sine * right), left * (sine * down + cosine * right)];
  });
  const alpha = SOFTEST * (ALPHA.hard / SOFTEST) ** time;
  return setup({ ...BENCH, kernel, picture, size: SIZE, alpha, offsets }, null);
}

const eased = (time: number): number => time * time * (3 - 2 * time);
