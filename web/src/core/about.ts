/** What a layer of a payload is, in words: what it looks at, its grid, what lies beside the grid, what is stored. */
import type { Layer, Payload } from "./payload";
import { storedQueries } from "./rows";
import { elsewhereOf } from "./statistics";
import { percent } from "./words";

const KINDS = { positions: "positions alone", content: "content and positions", rows: "stored rows" } as const;

export function aboutLayer(payload: Payload, index: number): string {
  const layer = payload.manifest.layers[index]!;
  const [height, width] = layer.sizes;
  return [KINDS[layer.kind], layer.encoding, `${height} × ${width} tokens${besides(payload, index)}`, inside(layer), stored(payload, index)]
    .filter((part) => part !== "")
    .join(" · ");
}

/** Tokens before those of the grid, and what they or padding take from it in the mean over heads, queries and images. */
function besides(payload: Payload, index: number): string {
  const layer = payload.manifest.layers[index]!;
  const share = elsewhereOf(layer);
  if (layer.prefix === 0) return share !== null && share > 0 ? `; padding takes ${percent(share)} of the attention` : "";
  const others = layer.prefix === 1 ? "1 class token" : `${layer.prefix} class tokens and registers`;
  const takes = layer.prefix === 1 ? "takes" : "take";
  return ` after ${others}${share === null ? "" : ` that ${takes} ${percent(share)} of the attention`}`;
}

/** Windows, outside of which no head can look. */
function inside({ window }: Layer): string {
  return window === null ? "" : `attention stays inside windows of ${window[0]} × ${window[1]} tokens`;
}

/** How many tokens have a row, where not all have one. */
function stored(payload: Payload, index: number): string {
  const [height, width] = payload.manifest.layers[index]!.sizes;
  const count = storedQueries(payload, index)?.length ?? height * width;
  if (count === height * width) return "";
  return `rows of ${count} of ${height * width} tokens are kept, and the one nearest to the query is shown`;
}
