/** Attention laid over an image: a dark veil that is clear where a head attends most. */
import { levelOf } from "../core/contours";
import { outlinePath } from "./planes";

export interface Overlay {
  /** Name of the head. */
  readonly name: string;
  readonly colour: string;
  /** Rows and columns of the map. */
  readonly sizes: readonly [number, number];
  readonly shares: Float64Array;
  /** From a probability to brightness. */
  readonly brightness: (probability: number) => number;
  /** Whether the attention is almost uniform: it then has no veil. */
  readonly flat: boolean;
}

const DARKEST = 0.7; // opacity of the veil

export function paintVeil(canvas: HTMLCanvasElement, overlay: Overlay | null): void {
  const context = canvas.getContext("2d");
  if (context === null || overlay === null) return;
  const { sizes: [height, width], shares, brightness } = overlay;
  [canvas.width, canvas.height] = [width, height];
  const picture = context.createImageData(width, height);
  const most = brightness(Math.max(...shares));
  shares.forEach((share, key) => (picture.data[4 * key + 3] = 255 * DARKEST * (1 - brightness(share) / most)));
  context.putImageData(picture, 0, 0);
}

/** Return the outlines of 50% and 90% of the attention, with the image's corner at (0, 0) and tokens of size 1. */
export function shareOutlines({ shares, sizes }: Overlay): { half: string; most: string } {
  const path = (share: number): string => outlinePath(shares, sizes[1], levelOf(shares, share), [0, 0]);
  return { half: path(0.5), most: path(0.9) };
}
