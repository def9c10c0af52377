/**
 * Bound on the error of soft heads, for any image: `attnconv.theory.error_bound` for one channel.
 *
 *     |out - conv|  <=  soft  +  misplaced  +  missing  +  rounding
 *     soft = sum_h eps_h |w_h| (max x - min x)
 *
 * where eps_h is the largest probability of head h outside its nearest key. Heads that attend to a pixel other than their
 * tap's, and taps without a head, are outside the theorem; the most that they can contribute is a separate term. Rounding
 * covers both attention and convolution, so it includes all taps, with or without a head.
 */
import type { Heads } from "./theorem";

const UNIT = 2 ** -53; // unit roundoff of float64, in which the page computes

/** Compute the largest probability of a Gaussian head outside its nearest key: 1 - 1 / (S(f_row) S(f_column)). */
export function massOffNearest(alpha: number, offsets: readonly number[]): number {
  return -Math.expm1(-offsets.reduce((sum, offset) => sum + Math.log1p(others(alpha, offset)), 0));
}

/** Compute S - 1, where S is the sum of exp(-alpha ((k - f)^2 - f^2)) over integers k; for alpha < 1 by Poisson summation. */
function others(alpha: number, offset: number): number {
  let sum = 0;
  if (alpha >= 1) {
    for (let k = 1; k <= 8; k++) {
      sum += Math.exp(-alpha * k * (k - 2 * offset)) + Math.exp(-alpha * k * (k + 2 * offset));
    }
    return sum;
  }
  for (let k = 1; k <= 3; k++) sum += Math.exp((-(Math.PI ** 2) * k * k) / alpha) * Math.cos(2 * Math.PI * k * offset);
  return Math.exp(alpha * offset * offset) * Math.sqrt(Math.PI / alpha) * (1 + 2 * sum) - 1;
}

export interface Bound {
  /** Softness of the heads. */
  readonly soft: number;
  /** Rounding in float64, over all taps, with or without a head. */
  readonly rounding: number;
  /** Heads that attend to a pixel other than their tap's: at most |w_h| (max x - min x) each. */
  readonly misplaced: number;
  /** Taps without a head: at most |w_h| max |x| each. */
  readonly missing: number;
  readonly total: number;
}

export interface Inputs {
  readonly low: number;
  readonly high: number;
}

/** Compute the bound for heads assigned to the taps at `shifts`, for images with values in [low, high]. */
export function errorBound(
  heads: Heads,
  shifts: readonly (readonly [number, number])[],
  inputs: Inputs,
  border: string,
): Bound {
  const low = border === "zero" ? Math.min(inputs.low, 0) : inputs.low;
  const high = border === "zero" ? Math.max(inputs.high, 0) : inputs.high;
  const size = Math.max(Math.abs(low), Math.abs(high));
  let [soft, misplaced, missing, weights, count] = [0, 0, 0, 0, 0];
  heads.centres.forEach((centre, head) => {
    const weight = Math.abs(heads.weights[head] ?? 0);
    count += 1;
    weights += weight;
    if (heads.present[head] === false) {
      missing += weight * size;
      return;
    }
    if (looksAt(centre, shifts[head] ?? [0, 0])) {
      soft += massOffNearest(heads.alpha, centre.map((place) => place - Math.round(place))) * weight * (high - low);
    } else misplaced += weight * (high - low);
  });
  const keys = (2 * Math.sqrt(-Math.log(UNIT) / heads.alpha) + 2) ** 2;
  const rounding = UNIT * (keys + 16 * 2 + 2 * count + 8) * weights * size;
  return { soft, rounding, misplaced, missing, total: soft + rounding + misplaced + missing };
}

/** Whether the tap's pixel is a nearest pixel to the head's centre. */
export function looksAt(centre: readonly [number, number], shift: readonly [number, number]): boolean {
  return Math.abs(centre[0] - shift[0]) <= 0.5 && Math.abs(centre[1] - shift[1]) <= 0.5;
}
