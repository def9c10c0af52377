/** Labels and predictions of a payload's images. */
import { percent } from "./format";
import type { PayloadImage } from "./payload";

/** Whether the most probable class of an image is its label; null if either is unknown. */
export const isRight = ({ label, predictions: [first] }: PayloadImage): boolean | null =>
  label !== null && first ? first[0] === label : null;

/** Describe an image's label and predictions in a sentence; empty if unknown. */
export function pictureWords(image: PayloadImage): string {
  const { label, predictions } = image;
  const right = isRight(image);
  const listed = predictions.map(([name, probability]) => `${name} ${percent(probability)}`).join(", ");
  return [
    right === null ? "" : right ? "✓ Right." : "✗ Wrong.",
    label === null ? "" : `Label: ${label}.`,
    listed === "" ? "" : `Predicted: ${listed}.`,
  ].filter((part) => part).join(" ");
}
