/** Workbench settings and comparisons for the article's figures. */
import type { Plane } from "../core/convolution";
import { convolve, difference } from "../core/convolution";
import type { Setup } from "../core/bench";
import type { ArticleState } from "../state/article";
import { BENCH, type BenchState, checkedBench, hard } from "../state/bench";

/** Return the workbench state for "Open in the workbench". */
export function benchOf(article: ArticleState): BenchState {
  const { kernel, alpha, offsets, missing, border, query, frozen } = article;
  return checkedBench({ ...BENCH, size: 32, kernel, alpha, offsets, missing, border, query, frozen });
}

/** Hard heads, with one head moved from its own shift to a neighbouring one. */
export function twoOnOneShift(): Partial<BenchState> {
  const offsets = new Array<number>(18).fill(0);
  offsets[2 * BENCH.head + 1] = 1; // from the left neighbour to the query itself
  return { ...hard(), offsets };
}

/** Compare a layer's output with a zero-padded convolution: their difference, and its largest magnitude inside the image and at its border. */
export function besideZeros(setup: Setup, attention: Plane): { convolution: Plane; apart: Plane; inside: number; border: number } {
  const convolution = convolve(setup.image, setup.kernel, { ...setup.geometry, border: "zero" });
  const apart = difference(attention, convolution);
  const { height, width, data } = apart;
  let [inside, border] = [0, 0];
  data.forEach((value, at) => {
    const [row, column] = [Math.floor(at / width), at % width];
    if (row === 0 || column === 0 || row === height - 1 || column === width - 1) border = Math.max(border, Math.abs(value));
    else inside = Math.max(inside, Math.abs(value));
  });
  return { convolution, apart, inside, border };
}
