/** Synthetic square grey images with values from 0 (black) to 1 (white). */
import type { Plane } from "./convolution";

export const PICTURES = ["disc", "stripes", "letters", "checker"] as const;
export type PictureName = (typeof PICTURES)[number];
export const SIZES = [32, 48, 64] as const;

/** The letters A, T and N as 5 x 7 bitmaps: one five-bit number per row. */
const LETTERS: readonly (readonly number[])[] = [
  [14, 17, 17, 31, 17, 17, 17],
  [31, 4, 4, 4, 4, 4, 4],
  [17, 25, 21, 21, 19, 17, 17],
];

export function pictureNamed(name: PictureName, size: number): Plane {
  const at = { disc, stripes, letters, checker }[name];
  const data = Float64Array.from({ length: size * size }, (_, index) => {
    const pixel = at((Math.floor(index / size) + 0.5) / size, ((index % size) + 0.5) / size);
    return Math.round(pixel * 255) / 255;
  });
  return { height: size, width: size, data };
}

/** A disc lit from the upper left, on a horizontal gradient. */
function disc(row: number, column: number): number {
  const [y, x] = [(row - 0.5) / 0.34, (column - 0.5) / 0.34];
  const inside = 1 - x * x - y * y;
  return inside <= 0 ? 0.1 + 0.25 * column : Math.min(1, 0.45 + 0.5 * Math.max(0, 0.7 * Math.sqrt(inside) - 0.5 * (x + y)));
}

/** Stripes that become finer from left to right. */
function stripes(row: number, column: number): number {
  return 0.5 + 0.5 * Math.sin(2 * Math.PI * (2 * column + 5 * column * column + 1.5 * row));
}

function letters(row: number, column: number): number {
  const [line, place] = [Math.floor(row * 2), Math.floor(column * 2)];
  const letter = LETTERS[[0, 1, 1, 2][line * 2 + place]!]!;
  const [y, x] = [Math.floor((row * 2 - line) * 9) - 1, Math.floor((column * 2 - place) * 7) - 1];
  const drawn = y >= 0 && y < 7 && x >= 0 && x < 5 && (letter[y]! >> (4 - x)) & 1;
  return drawn ? 0.05 : 0.92;
}

/** A checkerboard with contrast decreasing from top to bottom. */
function checker(row: number, column: number): number {
  const dark = (Math.floor(row * 8) + Math.floor(column * 8)) % 2;
  return 0.5 + (dark ? -0.5 : 0.5) * (1 - 0.8 * row);
}
