/** The audit's statistics of a payload as a table: one line for each head, and one for each layer. */
import type { Payload } from "./payload";

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

/** By a column, "layer" or "head"; lines without the number come last, and lines that are equal keep their order. */
export function sorted(lines: readonly Line[], column: string, down: boolean): readonly Line[] {
  const known = column === "layer" || column === "head" || lines.some((line) => column in line.numbers);
  if (!known) return lines;
  const value = (line: Line): number | null =>
    column === "layer" || column === "head" ? line[column] : (line.numbers[column] ?? null);
  return [...lines].sort((left, right) => {
    const [one, other] = [value(left), value(right)];
    if (one === null || other === null) return Number(one === null) - Number(other === null);
    return down ? other - one : one - other;
  });
}
