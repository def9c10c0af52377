/** One-line description of a payload's layer: kind, encoding, grid, other tokens, window, stored rows. */
import type { Layer, Payload } from "./payload";
import { storedQueries } from "./rows";
import { elsewhereOf } from "./statistics";
import { percent } from "./format";

const KINDS = { positions: "positions only", content: "content and positions", rows: "stored rows" } as const;

export function aboutLayer(payload: Payload, index: number): string {
  const layer = payload.manifest.layers[index]!;
  const [height, width] = layer.sizes;
  return [KINDS[layer.kind], layer.encoding, `${height} × ${width} tokens${besides(payload, index)}`, inside(layer), stored(payload, index)]
    .filter((part) => part !== "")
    .join(" · ");
}

/** Describe tokens before the grid, and the mean attention to them or to padding over heads, queries and images. */
function besides(payload: Payload, index: number): string {
  const layer = payload.manifest.layers[index]!;
  const share = elsewhereOf(layer);
  if (layer.prefix === 0) return share !== null && share > 0 ? ` · ${percent(share)} of attention on padding` : "";
  const others = layer.prefix === 1 ? "class token" : "class tokens and registers";
  return ` + ${layer.prefix} ${others}${share === null ? "" : ` · ${percent(share)} of attention on ${layer.prefix === 1 ? "the " : ""}${others}`}`;
}

/** Describe the windows that attention is restricted to. */
function inside({ window }: Layer): string {
  return window === null ? "" : `attention within windows of ${window[0]} × ${window[1]} tokens`;
}

/** Describe how many queries have stored rows, unless all have. */
function stored(payload: Payload, index: number): string {
  const [height, width] = payload.manifest.layers[index]!.sizes;
  const count = storedQueries(payload, index)?.length ?? height * width;
  if (count === height * width) return "";
  return `rows stored for ${count} of ${height * width} queries, the nearest one is shown`;
}
