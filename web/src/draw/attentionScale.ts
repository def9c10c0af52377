/**
 * The colour of attention, the same for all maps: "times uniform", the probability p of a key times the number T of tokens.
 *
 *     brightness = log(p T) / log(finest), from 0 for uniform attention or less to 1
 *
 * `finest` is the number of tokens of the payload's finest grid, so p = 1 is brightest there. Scores before the softmax
 * are log(p T), see `maps`, and have the same colours.
 */

/** Return a function from probabilities over `tokens` tokens to brightness. */
export function brightnessOf(tokens: number, finest: number): (probability: number) => number {
  const whole = finest > 1 ? 1 / Math.log(finest) : 0;
  return (probability) => {
    const times = probability * tokens;
    return times > 1 ? Math.min(1, Math.log(times) * whole) : 0;
  };
}

/** Return a function from scores relative to uniform attention to brightness. */
export const scoreBrightness = (finest: number) => (score: number): number =>
  finest > 1 ? Math.min(Math.max(score / Math.log(finest), 0), 1) : 0;

/** Whether attention is almost uniform: no probability is twice the uniform one. */
export const isFlat = (map: Float64Array): boolean => map.every((probability) => probability * map.length < 2);

/** Return the marks of the legend, and their places from 0 to 1: powers of 4 (or of 16) that are not near the end, and the end. */
export function legendMarks(finest: number): { times: number; at: number }[] {
  if (finest <= 1) return [{ times: 1, at: 0 }];
  const base = finest > 4 ** 6 ? 16 : 4;
  const marks = [];
  for (let times = 1; Math.log(times) < 0.85 * Math.log(finest); times *= base) marks.push({ times, at: Math.log(times) / Math.log(finest) });
  return [...marks, { times: finest, at: 1 }];
}
