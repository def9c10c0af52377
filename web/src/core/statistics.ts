/** The audit's statistics of a payload as a table: one line for each head, and one for each layer. */
import type { Layer, Payload } from "./payload";
import { shortNumber } from "./words";

export interface Line {
  readonly layer: number;
  readonly head: number;
  readonly name: string;
  /** By column; null where a number does not apply. */
  readonly numbers: Readonly<Record<string, number | null>>;
}

export interface Statistics {
  readonly columns: readonly string[];
  readonly lines: readonly Line[];
}

/** The share of attention that a convolution with one tap per head would account for; null where it is not known. */
export const scoreOf = (layer: Layer): number | null => layer.statistics.layer["score"] ?? null;

/** Mean over heads of what falls on class tokens, registers and padding; null where it is not known. */
export function elsewhereOf(layer: Layer): number | null {
  const shares = (layer.statistics.heads["mass elsewhere"] ?? []).filter((share) => share !== null);
  return shares.length > 0 ? shares.reduce((sum, share) => sum + share, 0) / shares.length : null;
}

const MOST_ROUNDING = 0.01; // nats: shares are then right to exp(0.02), 2 %

/** A warning where scores are stored so roughly that shares are visibly off; empty where they are not. */
export function roughness(layer: Layer): string {
  const rounding = layer.statistics.layer["rounding of scores"] ?? 0;
  if (rounding <= MOST_ROUNDING) return "";
  const factor = shortNumber(Math.exp(2 * rounding));
  return `Scores of this layer are stored roughly: within a row they are off by up to ${shortNumber(rounding)} nats, and a probability by up to a factor of ${factor}.`;
}

/** Numbers of one column alike: as many decimals as give the largest three digits. A number is zero only if it is. */
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

/** Heads of all layers; columns in the order in which the layers name them. */
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

/** What a table calls a statistic: its name, or `=layer` and `=head`, since the places of its lines are "layer" and "head". */
export const columnOf = (name: string): string => (/^=*(layer|head)$/.test(name) ? `=${name}` : name);

/** By a column (`columnOf`), or the places "layer" and "head"; lines without the number come last, and lines that are equal keep their order. */
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
