/**
 * A page inside a notebook's frame: it tells the notebook what is looked at, and looks where the notebook asks it to.
 *
 *     page to parent   { type: "attnconv-selection", selection: {layer, head, query, image, time, part} or null }
 *     parent to page   { type: "attnconv-select", layer?, head?, query?, image? }, answered by the former
 *
 * A frame without an origin of its own cannot know its parent's, so what it tells holds places and no numbers of the model,
 * and what it is asked is taken from its parent alone, and only where every entry fits the payload.
 */
import { type Choice, carried, choiceFor, finest, nearestStored, queryIn } from "../core/maps";
import type { Payload } from "../core/payload";
import type { Part } from "../core/rows";
import { isRecord } from "../core/safetensors";
import type { ModelState } from "./model";

export const TELLS = "attnconv-selection";
export const ASKS = "attnconv-select";

/** What is looked at, in numbers of the payload. */
export interface Selection {
  readonly layer: number;
  readonly head: number;
  /** (row, column) in tokens of the layer, where a row is known. */
  readonly query: readonly [number, number];
  /** null for the mean over all. */
  readonly image: number | null;
  readonly time: number;
  readonly part: Part;
}

/** The window that holds this page in a frame by its text; null for any other page. */
export function notebook(): Window | null {
  return location.protocol === "about:" && parent !== window ? parent : null;
}

export function selectionOf(payload: Payload, model: ModelState): Selection {
  const { layers } = payload.manifest;
  const layer = Math.min(model.layer, layers.length - 1);
  const { heads, sizes } = layers[layer]!;
  const grid = finest(payload);
  const [row, column] = carried(queryIn(model.query, grid), grid, sizes);
  const token = nearestStored(payload, layer, row * sizes[1] + column);
  const { image, mean, time, part }: Choice = choiceFor(payload, { ...model, part: model.part as Part });
  return {
    layer,
    head: Math.min(model.head, heads - 1),
    query: [Math.floor(token / sizes[1]), token % sizes[1]],
    image: mean ? null : image,
    time,
    part,
  };
}

const ENTRIES = ["type", "layer", "head", "query", "image"];

/** What a message changes, nothing where it only asks; null where it is no legal message for this payload. */
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
    [change.layer, change.head, change.zoomed, change.key] = [layer, head, true, []];
  }
  if (query !== undefined) {
    if (!Array.isArray(query) || query.length !== 2) return null;
    const [row, column]: unknown[] = query; // an array may have holes, which its own methods pass over
    if (!isIndex(row, sizes[0]) || !isIndex(column, sizes[1])) return null;
    [change.query, change.frozen] = [carried([row, column], sizes, finest(payload)), true];
  }
  return change;
}

function isIndex(value: unknown, count: number): value is number {
  return Number.isInteger(value) && (value as number) >= 0 && (value as number) < count;
}

const PAUSE = 100; // milliseconds: a pointer moves faster than a kernel listens

/** Tells what is looked at whenever that is something else, at most ten times a second, the latest for certain. */
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

  /** The same again, to one who asks. */
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
