/** Synthetic pictures for the tests, which have no decoder for the page's photographs. */
import type { Plane } from "../src/core/convolution";
import { PHOTOGRAPHS, keep } from "../src/core/photographs";

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

/** A checkerboard with contrast decreasing from top to bottom. */
function checker(row: number, column: number): number {
  const dark = (Math.floor(row * 8) + Math.floor(column * 8)) % 2;
  return 0.5 + (dark ? -0.5 : 0.5) * (1 - 0.8 * row);
}

const PICTURES = { disc, stripes, checker };

export function picture(name: keyof typeof PICTURES, size: number): Plane {
  const at = PICTURES[name];
  const data = Float64Array.from({ length: size * size }, (_, index) => {
    const pixel = at((Math.floor(index / size) + 0.5) / size, ((index % size) + 0.5) / size);
    return Math.round(pixel * 255) / 255;
  });
  return { height: size, width: size, data };
}

/** Keep the synthetic pictures in place of the photographs. */
Object.keys(PICTURES).forEach((name, index) => {
  const { data } = picture(name as keyof typeof PICTURES, 64);
  keep(PHOTOGRAPHS[index]!, Uint8ClampedArray.from({ length: 4 * data.length }, (_, at) => (at % 4 === 3 ? 255 : 255 * data[at >> 2]!)));
});
