/** Tables of a payload's statistics: one line per head, and one per layer. */
import type { Layer, Payload } from "./payload";
import { shortNumber } from "./format";

export interface Line {
  readonly layer: number;
  readonly head: number;
  readonly name: string;
  /** Values by column; null where a statistic does not apply. */
  readonly numbers: Readonly<Record<string, number | null>>;
}

export interface Statistics {
  readonly columns: readonly string[];
  readonly lines: readonly Line[];
}

/** Return the mean attention over heads to class tokens, registers and padding; null if unknown. */
export function elsewhereOf(layer: Layer): number | null {
  const shares = (layer.statistics.heads["mass elsewhere"] ?? []).filter((share) => share !== null);
  return shares.length > 0 ? shares.reduce((sum, share) => sum + share, 0) / shares.length : null;
}

const MOST_ROUNDING = 0.01; // nats: probabilities are then accurate to a factor of exp(0.02), that is 2%

/** Return a warning if the stored scores are so inaccurate that probabilities are visibly wrong, otherwise "". */
export function roughness(layer: Layer): string {
  const rounding = layer.statistics.layer["rounding of scores"] ?? 0;
  if (rounding <= MOST_ROUNDING) return "";
  const factor = shortNumber(Math.exp(2 * rounding));
  return `The stored scores of this layer are approximate: errors are up to ${shortNumber(rounding)} nats in the scores and up to a factor of ${factor} in the probabilities.`;
}

/** Return a formatter for a column: the number of decimals gives the largest value three digits. Only 0 is shown as 0. */
export function alike(values: readonly (number | null)[]): (value: number | null) => string {
  const known = values.filter((value) => value !== null);
  const largest = Math.max(...known.map(Math.abs));
  const whole = known.every(Number.isInteger);
  const decimals = whole ? 0 : Math.min(3, Math.max(0, 2 - Math.floor(Math.log10(largest))));
  return (value) => {
    if (value === null) return "–";
    const rounded = Number(value.toPrecision(3)).toFixed(decimals);
    return Number(rounded) === 0 && value !== 0 ? shortNumber(value) : rounded.replace("-", "−");
  };
}

/** Return the statistics of all heads, with columns in the layers' order. */
export function headStatistics(payload: Payload): Statistics {
  const { layers } = payload.manifest;
  const columns = [...new Set(layers.flatMap((layer) => Object.keys(layer.statistics.heads)))];
  const lines = layers.flatMap((layer, index) =>
    Array.from({ length: layer.heads }, (_, head) => ({
      layer: index,
      head,
      name: layer.name,
      numbers: Object.fromEntries(columns.map((name) => [name, layer.statistics.heads[name]?.[head] ?? null])),
    })),
  );
  return { columns: columns.filter((name) => lines.some((line) => line.numbers[name] !== null)), lines };
}

export function layerStatistics(payload: Payload): Statistics {
  const { layers } = payload.manifest;
  const columns = [...new Set(layers.flatMap((layer) => Object.keys(layer.statistics.layer)))];
  const lines = layers.map((layer, index) => ({ layer: index, head: 0, name: layer.name, numbers: layer.statistics.layer }));
  return { columns: columns.filter((name) => lines.some((line) => (line.numbers[name] ?? null) !== null)), lines };
}

/** Return the column key of a statistic: its name, or `=layer` and `=head`, since "layer" and "head" are the index columns. */
export const columnOf = (name: string): string => (/^=*(layer|head)$/.test(name) ? `=${name}` : name);

/** Sort lines by a column key, or by "layer" or "head". The sort is stable, and lines without the value come last. */
export function sorted(lines: readonly Line[], column: string, down: boolean): readonly Line[] {
  const place = column === "layer" || column === "head" ? column : null;
  const name = column.replace(/^=(?==*(layer|head)$)/, "");
  if (place === null && !lines.some((line) => Object.hasOwn(line.numbers, name))) return lines;
  const value = (line: Line): number | null => (place !== null ? line[place] : (line.numbers[name] ?? null));
  return [...lines].sort((left, right) => {
    const [one, other] = [value(left), value(right)];
    if (one === null || other === null) return Number(one === null) - Number(other === null);
    return down ? other - one : one - other;
  });
}

/** Return the heads of a layer sorted by a column key; in the model's order for other columns than statistics of heads. */
export function headOrder(layer: Layer, column: string, down: boolean): readonly number[] {
  const lines = Array.from({ length: layer.heads }, (_, head) => ({
    layer: 0,
    head,
    name: "",
    numbers: Object.fromEntries(Object.entries(layer.statistics.heads).map(([name, values]) => [name, values[head] ?? null])),
  }));
  if (column === "layer" || column === "head") return lines.map(({ head }) => head);
  return sorted(lines, column, down).map(({ head }) => head);
}
