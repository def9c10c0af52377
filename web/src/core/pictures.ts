/** Labels and predictions of a payload's images. */
import { percent } from "./format";
import type { Payload } from "./payload";
import type { Numbers } from "./safetensors";

const SHOWN = 3; // classes

/** A class and its probability. */
export type Prediction = readonly [name: string, probability: number];

/** Return the logits of an image; null if they are unknown. */
export function logitsOf({ logits, manifest: { classes } }: Payload, image: number): Numbers | null {
  return logits && (image + 1) * classes.length <= logits.data.length ? logits.data.subarray(image * classes.length, (image + 1) * classes.length) : null;
}

/** Return the softmax of logits. */
export function softmaxOf(logits: Iterable<number>): number[] {
  const all = [...logits];
  const most = Math.max(...all);
  const powers = all.map((logit) => Math.exp(logit - most));
  const sum = powers.reduce((one, other) => one + other, 0);
  return powers.map((power) => power / sum);
}

/** Return the most probable classes, the most probable one first. */
export function bestOf(classes: readonly string[], probabilities: readonly number[]): Prediction[] {
  return classes.map((name, index) => [name, probabilities[index]!] as const).sort((one, other) => other[1] - one[1]).slice(0, SHOWN);
}

/** Return the model's most probable classes for an image; empty if they are unknown. */
export function predictionsOf(payload: Payload, image: number): Prediction[] {
  const logits = logitsOf(payload, image);
  return logits ? bestOf(payload.manifest.classes, softmaxOf(logits)) : [];
}

/** Whether the most probable class of an image is its label; null if either is unknown. */
export function isRight(payload: Payload, image: number): boolean | null {
  const label = payload.manifest.images[image]?.label ?? null;
  const [first] = predictionsOf(payload, image);
  return label !== null && first ? first[0] === label : null;
}

/** List predictions in words. */
export const predictionWords = (predictions: readonly Prediction[]): string =>
  predictions.map(([name, probability]) => `${name} ${percent(probability)}`).join(", ");

/** Describe an image's label and predictions in a sentence; empty if unknown. */
export function pictureWords(payload: Payload, image: number): string {
  const label = payload.manifest.images[image]?.label ?? null;
  const right = isRight(payload, image);
  const listed = predictionWords(predictionsOf(payload, image));
  return [
    right === null ? "" : right ? "✓ Right." : "✗ Wrong.",
    label === null ? "" : `Label: ${label}.`,
    listed === "" ? "" : `Predicted: ${listed}.`,
  ].filter((part) => part).join(" ");
}
