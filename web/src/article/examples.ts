/** Direct computations for the article's small figures; larger figures use `core/theorem.ts`. */
import { type Plane, difference, largest } from "../core/convolution";
import type { Photograph } from "../core/photographs";
import { softmax } from "../core/rows";

/** Seeded uniform random numbers in [0, 1) (mulberry32). */
export function uniform(seed: number): () => number {
  let state = seed | 0;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** Return a permutation of 0 .. size - 1: position i gets element order[i]. Seed 0 gives the identity. */
export function shuffled(size: number, seed: number): number[] {
  const order = Array.from({ length: size }, (_, index) => index);
  if (seed === 0) return order;
  const next = uniform(seed);
  for (let last = size - 1; last > 0; last--) {
    const other = Math.floor(next() * (last + 1));
    [order[last], order[other]] = [order[other]!, order[last]!];
  }
  return order;
}

export function reordered({ height, width, data, colours }: Photograph, order: readonly number[]): Photograph {
  const greys = Float64Array.from(order, (from) => data[from]!);
  if (colours === undefined) return { height, width, data: greys };
  const moved = Uint8ClampedArray.from({ length: colours.length }, (_, at) => colours[4 * order[at >> 2]! + (at & 3)]!);
  return { height, width, data: greys, colours: moved };
}

/** A head of the article's examples: score = -near |key - query - centre|^2 - alike (grey_query - grey_key)^2. */
export interface Head {
  /** Sharpness of the position term in 1 / pixel^2; 0 for heads without positions. */
  readonly near: number;
  /** Sharpness of the content term in 1 / grey level^2. */
  readonly alike: number;
  /** (row, column) in pixels from the query. */
  readonly centre: readonly number[];
}

/**
 * Compute one query's probabilities over the whole image. Up to a constant per query, the content term is the product
 * (2 alike grey_query, -alike) . (grey_key, grey_key^2).
 */
export function attentionRow(image: Plane, query: number, head: Head): Plane {
  const { height, width, data } = image;
  const [row, column] = [Math.floor(query / width) + head.centre[0]!, (query % width) + head.centre[1]!];
  const scores = Float64Array.from({ length: height * width }, (_, key) => {
    const apart = (Math.floor(key / width) - row) ** 2 + ((key % width) - column) ** 2;
    return -head.near * apart - head.alike * (data[query]! - data[key]!) ** 2;
  });
  softmax(scores);
  return { height, width, data: scores };
}

/** Compute a head's output for one query: the mean of the image under its probabilities. */
export const mixed = (row: Plane, image: Plane): number =>
  row.data.reduce((sum, share, key) => sum + share * image.data[key]!, 0);

/** Compute a head's output at every pixel. */
export function outputOf(image: Plane, head: Head): Plane {
  const { height, width, data } = image;
  return { height, width, data: data.map((_, query) => mixed(attentionRow(image, query, head), image)) };
}

/** Compute the outputs before and after shuffling, and their difference after restoring the order. */
export function shuffling(image: Photograph, order: readonly number[], head: Head) {
  const mixedImage = reordered(image, order);
  const [before, after] = [outputOf(image, head), outputOf(mixedImage, head)];
  const places = order.map((_, pixel) => order.indexOf(pixel));
  const restored = difference(reordered(after, places), before);
  return { mixedImage, before, after, restored, apart: largest(restored) };
}

export const TERMS = ["content – content", "content – position", "position – content", "position – position"] as const;

const FEATURES = 4;

/**
 * Compute the four terms of the score (x_q + p_q) W (x_k + p_k)^T for one query: x W x, x W p, p W x, p W p.
 *
 * x is the pixel's grey level times a fixed vector, p the sines and cosines of its row and column, and W a fixed random
 * matrix.
 */
export function fourTerms(image: Plane, query: number): Plane[] {
  const { matrix, contents, places } = embedded(image);
  const term = (from: readonly number[], to: readonly (readonly number[])[]): Plane => ({
    height: image.height,
    width: image.width,
    data: Float64Array.from(to, (key) =>
      matrix.reduce((sum, line, i) => sum + from[i]! * line.reduce((inner, weight, j) => inner + weight * key[j]!, 0), 0),
    ),
  });
  return [contents, places].flatMap((side) => [contents, places].map((other) => term(side[query]!, other)));
}

/** Return the fixed example: x and p of every pixel, and W. */
export function embedded(image: Plane) {
  const next = uniform(20);
  const drawn = (count: number): number[] => Array.from({ length: count }, () => 2 * next() - 1);
  const matrix = Array.from({ length: FEATURES }, () => drawn(FEATURES));
  const direction = drawn(FEATURES);
  const contents = Array.from(image.data, (grey) => direction.map((weight) => 4 * (grey - 0.5) * weight));
  const places = Array.from(image.data, (_, pixel) => {
    const turns = [Math.floor(pixel / image.width) / image.height, (pixel % image.width) / image.width];
    return turns.flatMap((turn) => [Math.sin(2 * Math.PI * turn), Math.cos(2 * Math.PI * turn)]);
  });
  return { matrix, contents, places };
}

/** Sum the chosen terms. */
export function summed(terms: readonly Plane[], chosen: readonly number[]): Plane {
  const data = terms[0]!.data.map((_, key) => terms.reduce((sum, term, index) => sum + (chosen[index] ? term.data[key]! : 0), 0));
  return { ...terms[0]!, data };
}

/** Apply the softmax to a plane of scores. */
export function probabilities(scores: Plane): Plane {
  const data = scores.data.slice();
  softmax(data);
  return { ...scores, data };
}

/** Compute one query's probabilities over the shifts within `radius`; (row, column) is its position in the image. */
export function windowRow(image: Plane, [row, column]: readonly [number, number], head: Head, radius: number): Plane {
  const width = 2 * radius + 1;
  const grey = (down: number, right: number): number => image.data[(row + down) * image.width + column + right]!;
  const data = Float64Array.from({ length: width * width }, (_, shift) => {
    const [down, right] = [Math.floor(shift / width) - radius, (shift % width) - radius];
    const apart = (down - head.centre[0]!) ** 2 + (right - head.centre[1]!) ** 2;
    return -head.near * apart - head.alike * (grey(0, 0) - grey(down, right)) ** 2;
  });
  softmax(data);
  return { height: width, width, data };
}

/**
 * Compute a head's mean probability for each shift, and how much its pattern varies with the content.
 *
 * A convolution can express the mean. `moves` is the mean over queries of half the sum of |row - mean|: 0 if the head
 * attends to the same shifts everywhere, close to 1 if it never does. Queries with a window that leaves the image are skipped.
 */
export function patternOf(image: Plane, head: Head, radius: number): { mean: Plane; moves: number } {
  const rows: Plane[] = [];
  for (let row = radius; row < image.height - radius; row++) {
    for (let column = radius; column < image.width - radius; column++) rows.push(windowRow(image, [row, column], head, radius));
  }
  const mean = rows[0]!.data.map((_, shift) => rows.reduce((sum, { data }) => sum + data[shift]!, 0) / rows.length);
  const moved = rows.reduce((sum, { data }) => sum + data.reduce((off, share, shift) => off + Math.abs(share - mean[shift]!), 0), 0);
  return { mean: { ...rows[0]!, data: mean }, moves: moved / 2 / rows.length };
}
