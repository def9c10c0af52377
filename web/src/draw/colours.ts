/**
 * Colour maps. `amount` is cividis, which has an even increase in lightness and suits most colour-blind people; `signed`
 * runs from blue through near-white to orange; `grey` is for images.
 */
export type Scale = "grey" | "amount" | "signed";
type Colour = readonly [number, number, number];

const ANCHORS: Readonly<Record<Scale, readonly string[]>> = {
  grey: ["#000000", "#ffffff"],
  amount: ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"],
  signed: ["#08306b", "#2f7ebc", "#9ecae1", "#f7f7f7", "#fdbf6f", "#e0761b", "#7f3300"],
};
const STEPS = 256;
const tables = new Map<Scale, Uint8ClampedArray>();

/** Return a colour map's 256 colours as RGBA bytes. */
export function table(scale: Scale): Uint8ClampedArray {
  const known = tables.get(scale);
  if (known) return known;
  const anchors = ANCHORS[scale].map(parsed);
  const bytes = new Uint8ClampedArray(4 * STEPS);
  for (let step = 0; step < STEPS; step++) {
    const place = (step / (STEPS - 1)) * (anchors.length - 1);
    const below = Math.min(Math.floor(place), anchors.length - 2);
    const mix = place - below;
    const [from, to] = [anchors[below]!, anchors[below + 1]!];
    for (let c = 0; c < 3; c++) bytes[4 * step + c] = from[c]! * (1 - mix) + to[c]! * mix;
    bytes[4 * step + 3] = 255;
  }
  tables.set(scale, bytes);
  return bytes;
}

function parsed(hex: string): Colour {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)) as unknown as Colour;
}

/** Return a colour map as a CSS gradient, left to right. */
export const gradient = (scale: Scale): string => `linear-gradient(to right, ${ANCHORS[scale].join(", ")})`;
