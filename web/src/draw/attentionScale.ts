/**
 * The colour of attention, the same for all maps: "times uniform", the probability p of a key times the number T of tokens.
 *
 *     brightness = log(p T) / log(finest), from 0 for uniform attention or less to 1
 *
 * `finest` is the number of tokens of the payload's finest grid, so p = 1 is brightest there. Scores before the softmax
 * have a fixed scale too: from 12 nats below the largest score of the map (dark) to the largest (bright).
 */

/** Lower end of the colour scale of scores, relative to the largest score of the map: exp(-12) = 0.000006. */
export const DEPTH = 12;

/** Return a function from probabilities over `tokens` tokens to brightness. */
export function brightnessOf(tokens: number, finest: number): (probability: number) => number {
  const whole = finest > 1 ? 1 / Math.log(finest) : 0;
  return (probability) => {
    const times = probability * tokens;
    return times > 1 ? Math.min(1, Math.log(times) * whole) : 0;
  };
}

/** Return the brightness of a score relative to the largest score of its map. */
export const scoreBrightness = (score: number): number => Math.max(0, 1 + score / DEPTH);

/** Whether attention is almost uniform: no probability is twice the uniform one. */
export const isFlat = (map: Float64Array): boolean => map.every((probability) => probability * map.length < 2);

/** Return the marks of the legend, and their places from 0 to 1: powers of 4 (or of 16), and the end of the scale. */
export function legendMarks(finest: number): { times: number; at: number }[] {
  if (finest <= 1) return [{ times: 1, at: 0 }];
  const base = finest > 4 ** 6 ? 16 : 4;
  const marks = [];
  for (let times = 1; times * Math.sqrt(base) <= finest; times *= base) marks.push({ times, at: Math.log(times) / Math.log(finest) });
  return [...marks, { times: finest, at: 1 }];
}
