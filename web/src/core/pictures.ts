/** What a payload says about its images: names, labels and predictions. */
import { percent } from "./format";
import type { Payload } from "./payload";

export interface AboutPicture {
  readonly name: string;
  /** Correct class; empty if unknown. */
  readonly label: string;
  /** Classes and their probabilities, the most probable first; empty if the model does not classify. */
  readonly predictions: readonly (readonly [string, number])[];
  /** Whether the first prediction is the label; null if either is unknown. */
  readonly right: boolean | null;
}

/** Return what is known about an image. Older payloads have only names. */
export function aboutPicture(payload: Payload, image: number): AboutPicture {
  const found: { name: string; label?: string | null; predictions?: readonly (readonly [string, number])[] | null } = payload.manifest.images[image]!;
  const [label, predictions] = [found.label ?? "", found.predictions ?? []];
  return { name: found.name, label, predictions, right: label && predictions.length > 0 ? predictions[0]![0] === label : null };
}

/** Describe an image's label and predictions in a sentence; empty if unknown. */
export function pictureWords({ label, predictions, right }: AboutPicture): string {
  const listed = predictions.map(([name, probability]) => `${name} ${percent(probability)}`).join(", ");
  if (right !== null) return `${right ? "✓ right" : "✗ wrong"}: this is a ${label}; predicted: ${listed}.`;
  return label ? `This is a ${label}.` : listed ? `Predicted: ${listed}.` : "";
}
