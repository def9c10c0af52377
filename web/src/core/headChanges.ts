/** Heads that are switched off or replaced with the nearest convolution, as text in a link: `layer.head.change,...`. */
import type { Payload } from "./payload";
import type { Numbers } from "./safetensors";

export const CHANGES = ["zero", "convolution"] as const;

export interface HeadChange {
  readonly layer: number;
  readonly head: number;
  readonly to: (typeof CHANGES)[number];
}

export const CHANGE_WORDS = { zero: "switched off", convolution: "replaced with the nearest convolution" } as const;

const ENTRY = /^(\d{1,4})\.(\d{1,4})\.(\w+)$/;

/** Read changes; those of heads that the payload does not have are ignored. */
export function changesIn(text: string, { manifest: { layers } }: Payload): HeadChange[] {
  return text.split(",").flatMap((entry) => {
    const [, layer, head, name] = ENTRY.exec(entry) ?? [];
    const to = CHANGES.find((known) => known === name);
    return to && Number(head) < (layers[Number(layer)]?.heads ?? 0) ? [{ layer: Number(layer), head: Number(head), to }] : [];
  });
}

export const changesText = (changes: readonly HeadChange[]): string => changes.map(({ layer, head, to }) => `${layer}.${head}.${to}`).join(",");

/** Describe changes, "layer 0, head 1 switched off; ...". */
export const changesWords = (changes: readonly HeadChange[]): string =>
  changes.map(({ layer, head, to }) => `layer ${layer}, head ${head} ${CHANGE_WORDS[to]}`).join("; ");

/** Return the logits of an image with one head changed; null if the payload does not contain them. */
export function changedLogits(payload: Payload, image: number, { layer, head, to }: HeadChange): Numbers | null {
  const tensor = payload.of(layer, `${to}_logits`);
  if (tensor === null) return null;
  const [, heads, classes] = tensor.shape as [number, number, number];
  const start = (image * heads + head) * classes;
  return tensor.data.subarray(start, start + classes);
}

/** Return the relative change of logits, |new - old| / |old|, in the Euclidean norm. */
export function relativeChange(before: ArrayLike<number>, after: ArrayLike<number>): number {
  const old = Array.from(before);
  return Math.hypot(...old.map((logit, index) => after[index]! - logit)) / Math.hypot(...old);
}
