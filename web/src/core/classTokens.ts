/** Attention of class tokens and registers to the image's tokens, renormalised over these. */
import type { Payload } from "./payload";
import type { Place } from "./rows";

/** Return the number of class tokens and registers whose attention the payload contains. */
export function classTokens(payload: Payload): number {
  return payload.manifest.layers.reduce((most, { prefix }, layer) => (payload.of(layer, "class_rows") ? Math.max(most, prefix) : most), 0);
}

/** Return the name of a class token or register. */
export const classTokenName = (index: number, count: number): string => (index === 0 ? "class token" : count === 2 ? "second token" : `register ${index}`);

/** Fill `into` (T) with the probabilities of a class token; return false if the payload does not contain them. */
export function writeClassRow(payload: Payload, { layer, head, image }: Place, token: number, into: Float64Array): boolean {
  const rows = payload.of(layer, "class_rows");
  const { heads, prefix } = payload.manifest.layers[layer]!;
  if (rows === null || token >= prefix) return false;
  const start = ((image * heads + head) * prefix + token) * into.length;
  for (let key = 0; key < into.length; key++) into[key] = rows.data[start + key]!;
  return true;
}

/** Return the attention of a class token to tokens that are not part of the image; null if unknown. */
export function classMass(payload: Payload, { layer, head, image }: Place, token: number): number | null {
  const mass = payload.of(layer, "class_mass");
  const { heads, prefix } = payload.manifest.layers[layer]!;
  return mass === null || token >= prefix ? null : mass.data[(image * heads + head) * prefix + token]!;
}
