/** Formatting of numbers and positions, shared by all views. */

const RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹";

/** Format a number with three significant digits by default, as a power of ten if it is very small or large. */
export function shortNumber(value: number, digits = 3): string {
  if (value === 0 || !Number.isFinite(value)) return String(value).replace("-", "−");
  const size = Math.abs(value);
  if (size >= 1e-3 && size < 1e5) return String(Number(value.toPrecision(digits))).replace("-", "−");
  const [mantissa, exponent] = value.toExponential(Math.max(1, digits - 2)).split("e") as [string, string];
  const raised = exponent.replace("+", "").replace("-", "⁻").replace(/\d/g, (digit) => RAISED[Number(digit)]!);
  return `${mantissa} × 10${raised}`.replace("-", "−");
}

export function percent(share: number): string {
  if (share > 0 && share < 0.001) return "under 0.1%";
  if (share < 1 && share > 0.9995) return "over 99.9%";
  return `${Number((100 * share).toFixed(1))}%`;
}

/** Return the largest entries in descending order. */
export function strongest(values: ArrayLike<number>, count: number): { index: number; value: number }[] {
  const found: { index: number; value: number }[] = [];
  for (let index = 0; index < values.length; index++) {
    const value = values[index]!;
    if (found.length === count && value <= found[count - 1]!.value) continue;
    let place = found.length;
    while (place > 0 && found[place - 1]!.value < value) place--;
    found.splice(place, 0, { index, value });
    if (found.length > count) found.pop();
  }
  return found;
}

/** List the keys with the highest probabilities on a grid, "row 3, column 5 (61%); ...", counted from 0. */
export function strongestKeys(row: ArrayLike<number>, width: number, count = 3): string {
  const keys = strongest(row, count).filter(({ value }) => value >= 0.001);
  if (keys.length === 0) return "no key with 0.1% or more";
  return keys
    .map(({ index, value }) => `row ${Math.floor(index / width)}, column ${index % width} (${percent(value)})`)
    .join("; ");
}

/** Return the message of an error. */
export const wordsOf = (error: unknown): string => (error instanceof Error ? error.message : String(error));
