/** Photographs of 64 x 64 pixels in colour. The library's computations use their grey levels, from 0 (black) to 1 (white). */
import type { Plane } from "./convolution";
import { FILES } from "./photographData";

/** An image of grey levels that may have colours, RGBA per pixel. */
export interface Photograph extends Plane {
  readonly colours?: Uint8ClampedArray;
}

export type PhotographName = keyof typeof FILES;
export const PHOTOGRAPHS = Object.keys(FILES) as PhotographName[];
export const SIZES = [32, 48, 64] as const;

export const CREDITS: Readonly<Record<PhotographName, { title: string; credit: string }>> = {
  cat: { title: "Cat", credit: "Chelsea the cat, photographed by Stéfan van der Walt (CC0)" },
  astronaut: { title: "Astronaut", credit: "Eileen Collins, photographed by NASA (public domain)" },
  coffee: { title: "Coffee", credit: "Coffee, photographed by Rachel Michetti (CC0)" },
};

const FULL = 64;
const decoded = new Map<PhotographName, Uint8ClampedArray>();
const scaled = new Map<string, Photograph>();

/** Store a photograph's 64 x 64 RGBA pixels. */
export function keep(name: PhotographName, pixels: Uint8ClampedArray): void {
  decoded.set(name, pixels);
  for (const key of scaled.keys()) if (key.startsWith(name)) scaled.delete(key);
}

/** Return a WebP file of a photograph. */
export const fileOf = (name: PhotographName): Blob =>
  new Blob([Uint8Array.from(atob(FILES[name]), (letter) => letter.charCodeAt(0))], { type: "image/webp" });

/** Return a photograph, scaled down to size x size pixels; mid-grey if the browser could not decode it. */
export function photographNamed(name: PhotographName, size: number): Photograph {
  const key = `${name} ${size}`;
  const known = scaled.get(key);
  if (known) return known;
  const pixels = decoded.get(name) ?? new Uint8ClampedArray(4 * FULL * FULL).fill(128);
  const photograph = withGreys(shrunk(pixels, size), size, size);
  scaled.set(key, photograph);
  return photograph;
}

/** Return RGBA pixels with their grey levels (luma, Rec. 601), rounded to 1 / 255. */
export function withGreys(colours: Uint8ClampedArray, height: number, width: number): Photograph {
  const data = Float64Array.from({ length: height * width }, (_, pixel) => {
    const [red, green, blue] = [colours[4 * pixel]!, colours[4 * pixel + 1]!, colours[4 * pixel + 2]!];
    return Math.round(0.299 * red + 0.587 * green + 0.114 * blue) / 255;
  });
  return { height, width, data, colours };
}

/** Scale an image down to size x size pixels, each the mean of the area that it covers. */
function shrunk(pixels: Uint8ClampedArray, size: number): Uint8ClampedArray {
  const share = (from: number, to: number): number =>
    Math.max(0, Math.min((to + 1) / size, (from + 1) / FULL) - Math.max(to / size, from / FULL)) * size;
  const first = (to: number): number => Math.floor((to * FULL) / size);
  const last = (to: number): number => Math.min(FULL - 1, Math.ceil(((to + 1) * FULL) / size) - 1);
  const colours = new Uint8ClampedArray(4 * size * size);
  for (let row = 0; row < size; row++) {
    for (let column = 0; column < size; column++) {
      const sums = [0, 0, 0, 0];
      for (let i = first(row); i <= last(row); i++) {
        for (let j = first(column); j <= last(column); j++) {
          const part = share(i, row) * share(j, column);
          for (let c = 0; c < 4; c++) sums[c]! += part * pixels[4 * (i * FULL + j) + c]!;
        }
      }
      colours.set(sums, 4 * (row * size + column));
    }
  }
  return colours;
}
