/**
 * Gaussian heads at any time of training.
 *
 *     score(d) = -1/2 (d - c)^T A (d - c),    between two snapshots: A and A c are interpolated linearly
 */
import type { Gaussian } from "./contours";
import type { Payload } from "./payload";

/** Return a head's centre as a shift (row, column), and its precision; null if the head is not a Gaussian. */
export function gaussianAt(payload: Payload, layer: number, head: number, time: number): Gaussian | null {
  const { kind, heads } = payload.manifest.layers[layer]!;
  const centres = payload.of(layer, "centres");
  const precision = payload.of(layer, "precision");
  if (kind !== "positions" || centres === null || precision === null) return null;
  const stored = (snapshot: number): Gaussian => {
    const at = snapshot * heads + head;
    return { centre: [centres.data[2 * at]!, centres.data[2 * at + 1]!], precision: precision.data.subarray(4 * at, 4 * at + 4) };
  };
  const before = stored(Math.floor(time));
  if (Number.isInteger(time)) return before;
  return mixed(before, stored(Math.floor(time) + 1), time - Math.floor(time));
}

function mixed(before: Gaussian, after: Gaussian, share: number): Gaussian {
  const mix = (one: number, other: number): number => (1 - share) * one + share * other;
  const [a, b, c, d] = [0, 1, 2, 3].map((at) => mix(before.precision[at]!, after.precision[at]!)) as [number, number, number, number];
  const [first, last] = [timesCentre(before), timesCentre(after)];
  const [down, right] = [mix(first[0], last[0]), mix(first[1], last[1])];
  const determinant = a * d - b * c;
  if (!(Math.abs(determinant) > 0)) return share < 0.5 ? before : after; // no unique centre
  return { centre: [(d * down - b * right) / determinant, (a * right - c * down) / determinant], precision: [a, b, c, d] };
}

const timesCentre = ({ centre: [down, right], precision }: Gaussian): [number, number] => [
  precision[0]! * down + precision[1]! * right,
  precision[2]! * down + precision[3]! * right,
];
