/**
 * Messages between a page in a notebook's frame and the notebook: the page reports its selection, the notebook changes it.
 *
 *     page to parent   { type: "attnconv-selection", selection: {layer, head, query, image, time, part} or null }
 *     parent to page   { type: "attnconv-select", layer?, head?, query?, image? }, answered by the message above
 *
 * A sandboxed frame cannot know its parent's origin. Its messages therefore contain only indices and no values of the
 * model, and it only accepts messages from its parent in which every entry is valid for the payload.
 */
import { type Choice, carried, choiceFor, finest, nearestStored, queryIn } from "../core/maps";
import type { Payload } from "../core/payload";
import type { Part } from "../core/rows";
import { isRecord } from "../core/safetensors";
import { MODEL, type ModelState } from "./model";

export const TELLS = "attnconv-selection";
export const ASKS = "attnconv-select";

/** The selection, as indices into the payload. */
export interface Selection {
  readonly layer: number;
  readonly head: number;
  /** (row, column) on the layer's grid, of a query with a stored row. */
  readonly query: readonly [number, number];
  /** null for the mean over all images. */
  readonly image: number | null;
  readonly time: number;
  readonly part: Part;
}

/** Return the parent window if this page is in a `srcdoc` frame, otherwise null. */
export function notebook(): Window | null {
  return location.protocol === "about:" && parent !== window ? parent : null;
}

export function selectionOf(payload: Payload, model: ModelState): Selection {
  const { layers } = payload.manifest;
  const enlarged = model.other ? MODEL : model; // the notebook does not have the second model
  const layer = Math.min(enlarged.layer, layers.length - 1);
  const { heads, sizes } = layers[layer]!;
  const grid = finest(payload);
  const [row, column] = carried(queryIn(model.query, grid), grid, sizes);
  const token = nearestStored(payload, layer, row * sizes[1] + column);
  const { image, mean, time, part }: Choice = choiceFor(payload, { ...model, part: model.part as Part });
  return {
    layer,
    head: Math.min(enlarged.head, heads - 1),
    query: [Math.floor(token / sizes[1]), token % sizes[1]],
    image: mean ? null : image,
    time,
    part,
  };
}

const ENTRIES = ["type", "layer", "head", "query", "image"];

/** Return the change that a message requests, {} if it only asks for the selection, null if it is invalid for the payload. */
export function changeAsked(payload: Payload, data: unknown): Partial<ModelState> | null {
  if (!isRecord(data) || data["type"] !== ASKS || Object.keys(data).some((name) => !ENTRIES.includes(name))) return null;
  const { layer, head, query, image } = data;
  const change: { -readonly [K in keyof ModelState]?: ModelState[K] } = {};
  if (image !== undefined) {
    if (!isIndex(image, payload.manifest.images.length)) return null;
    [change.image, change.mean] = [image, false];
  }
  if (layer === undefined) return head === undefined && query === undefined ? change : null;
  if (!isIndex(layer, payload.manifest.layers.length)) return null;
  const { heads, sizes } = payload.manifest.layers[layer]!;
  if (head !== undefined) {
    if (!isIndex(head, heads)) return null;
    [change.layer, change.head, change.zoomed, change.other, change.key] = [layer, head, true, false, []];
  }
  if (query !== undefined) {
    if (!Array.isArray(query) || query.length !== 2) return null;
    const [row, column]: unknown[] = query; // an array may have holes, which array methods skip
    if (!isIndex(row, sizes[0]) || !isIndex(column, sizes[1])) return null;
    [change.query, change.frozen, change.prefix] = [carried([row, column], sizes, finest(payload)), true, -1];
  }
  return change;
}

function isIndex(value: unknown, count: number): value is number {
  return Number.isInteger(value) && (value as number) >= 0 && (value as number) < count;
}

const PAUSE = 100; // milliseconds: pointer events are too frequent for a kernel

/** Sends the selection when it changes, at most ten times per second; the latest selection is always sent. */
export class Teller {
  private told = "null";
  private latest: () => Selection | null = () => null;
  private waiting: ReturnType<typeof setTimeout> | null = null;

  constructor(private readonly post: (message: { type: typeof TELLS; selection: Selection | null }) => void) {}

  tell(latest: () => Selection | null): void {
    this.latest = latest;
    if (this.waiting !== null) return;
    if (this.say()) this.pause();
  }

  /** Send the selection again, as the answer to a request. */
  answer(): void {
    this.told = "";
    this.tell(this.latest);
  }

  private pause(): void {
    this.waiting = setTimeout(() => {
      this.waiting = null;
      if (this.say()) this.pause();
    }, PAUSE);
  }

  private say(): boolean {
    const selection = this.latest();
    const text = JSON.stringify(selection);
    if (text === this.told) return false;
    this.told = text;
    this.post({ type: TELLS, selection });
    return true;
  }
}
