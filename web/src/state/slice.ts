/**
 * A slice of the state: a flat object of plain values that a link can restore.
 *
 * `written` lists only values that differ from the defaults. `read` parses each value by the type of its default and
 * ignores invalid values, so that an old or mistyped link still opens the page.
 */
export type Value = string | number | boolean | readonly number[];
export type Slice<T> = { readonly [K in keyof T]: Value };

const LONGEST = 200;

export function written<T extends Slice<T>>(prefix: string, slice: T, defaults: T): string[] {
  const entries = Object.keys(defaults) as (keyof T & string)[];
  return entries
    .filter((name) => text(slice[name]) !== text(defaults[name]))
    .map((name) => `${prefix}.${name}=${encodeURIComponent(text(slice[name])).replaceAll("%2C", ",")}`);
}

export function read<T extends Slice<T>>(prefix: string, values: URLSearchParams, defaults: T): T {
  const found: Record<string, Value> = {};
  for (const [name, standard] of Object.entries(defaults) as [string, Value][]) {
    const given = values.get(`${prefix}.${name}`);
    if (given !== null && given.length <= 20 * LONGEST) found[name] = parsed(given, standard) ?? standard;
  }
  return { ...defaults, ...found };
}

function text(value: Value): string {
  return typeof value === "object" ? value.join(",") : String(value);
}

function parsed(given: string, standard: Value): Value | null {
  if (typeof standard === "string") return given;
  if (typeof standard === "boolean") return given === "true" ? true : given === "false" ? false : null;
  if (typeof standard === "number") return number(given);
  const numbers = given === "" ? [] : given.split(",").map(number);
  return numbers.length <= LONGEST && numbers.every((entry) => entry !== null) ? numbers : null;
}

function number(given: string): number | null {
  const value = Number(given);
  return given.trim() !== "" && Number.isFinite(value) ? value : null;
}

/** Clamp `value` to [low, high], rounded to a multiple of `step` if it is not 0. */
export function clamped(value: number, low: number, high: number, step = 0): number {
  const rounded = step > 0 ? Math.round(value / step) * step : value;
  return Math.min(Math.max(rounded, low), high);
}
