/**
 * Painting of all visible maps together, at most once per animation frame.
 *
 * The pointer may report hundreds of positions per second; only the last one before a frame is computed. Strips outside
 * the viewport are skipped.
 */
import { type Choice, type Maps, carried, choiceFor, emptyMaps, fillMaps, finest } from "../core/maps";
import type { Payload } from "../core/payload";
import { brightnessOf, scoreBrightness } from "./attentionScale";
import { type Marks, Sheet, drawMap, frameOf, heightOf, linesOf } from "./maps";

export interface Wanted extends Marks {
  /** (row, column) on a grid of these sizes. */
  readonly query: readonly [number, number];
  readonly grid: readonly [number, number];
  readonly choice: Choice;
  /** Number of tokens at the bright end of the colour scale. */
  readonly tokens: number;
  /** Show only the tokens around the query if the grid is large. */
  readonly near: boolean;
}

/** Layout of the maps on their canvas, in CSS pixels. */
export interface Plan {
  readonly columns: number;
  /** Width of a map. */
  readonly side: number;
  /** Height of the title above a map. */
  readonly above: number;
  readonly gap: number;
  /** The heads from left to right. */
  readonly order: readonly number[];
  /** The highlighted head, or -1. */
  readonly selected: number;
}

/** The maps of one layer on the page. */
export class Strip {
  readonly maps: Maps;
  /** One canvas for all maps: the browser's overhead per canvas is larger than the cost of its pixels. */
  canvas: HTMLCanvasElement | null = null;
  /** Elements that show the largest probability or score of each map. */
  readonly captions: (HTMLElement | null)[] = [];
  /** The numbers for the captions. */
  readonly ends: Float64Array;
  readonly sheet = new Sheet();
  visible = false;
  plan: Plan = { columns: 1, side: 0, above: 0, gap: 0, order: [], selected: -1 };
  /** Called some frames after the maps have changed. */
  changed: (maps: Maps, choice: Choice) => void = () => {};

  constructor(
    readonly payload: Payload,
    readonly layer: number,
    /** Called with the reason why there are no maps; empty if there are. */
    readonly lacks: (words: string) => void,
    readonly words: (largest: number, softmax: boolean) => string,
  ) {
    this.maps = emptyMaps(payload.manifest.layers[layer]!);
    this.ends = new Float64Array(payload.manifest.layers[layer]!.heads);
  }
}

export class Atlas {
  private readonly strips = new Set<Strip>();
  private wanted: Wanted | null = null;
  /** Whether the maps must be repainted. */
  private asked = false;
  private frame = 0;
  /** Strips with outdated captions. */
  private readonly behind = new Set<Strip>();

  add(strip: Strip): () => void {
    this.strips.add(strip);
    this.soon();
    return () => {
      this.strips.delete(strip);
      this.behind.delete(strip);
    };
  }

  show(wanted: Wanted): void {
    this.wanted = wanted;
    this.soon();
  }

  /** Paint in the next animation frame. */
  soon(): void {
    this.asked = true;
    this.next();
  }

  /** Paint all visible maps and their captions now, before the page is printed. */
  now(): void {
    this.asked = true;
    do this.step();
    while (this.behind.size > 0);
  }

  /** Stop painting: the view, and with it the state that the strips read, is destroyed. */
  stop(): void {
    cancelAnimationFrame(this.frame);
  }

  private next(): void {
    if (this.frame === 0) this.frame = requestAnimationFrame(() => this.step());
  }

  /** Paint all maps, but update the captions of only one layer per frame: text layout takes longer than the maps. */
  private step(): void {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const asked = this.asked;
    this.asked = false;
    if (asked) this.paint();
    const [first] = this.behind;
    if (first === undefined || this.wanted === null) return;
    this.behind.delete(first);
    caption(first, this.wanted.choice.softmax);
    first.changed(first.maps, choiceFor(first.payload, this.wanted.choice));
    if (this.behind.size > 0) this.next();
  }

  private paint(): void {
    const { wanted } = this;
    if (wanted === null) return;
    for (const strip of this.strips) {
      if (!strip.visible) continue;
      fill(strip, wanted);
      strip.lacks(strip.maps.lack);
      if (strip.maps.lack) continue;
      draw(strip, wanted);
      this.behind.add(strip);
    }
  }
}

function fill(strip: Strip, wanted: Wanted): void {
  const { payload, layer, maps } = strip;
  const { sizes } = payload.manifest.layers[layer]!;
  const grid = finest(payload);
  const place = carried(carried(wanted.query, wanted.grid, grid), grid, sizes);
  fillMaps(maps, payload, layer, place[0] * sizes[1] + place[1], choiceFor(payload, wanted.choice));
}

function draw(strip: Strip, wanted: Wanted): void {
  const { payload, layer, maps, sheet } = strip;
  const { sizes } = payload.manifest.layers[layer]!;
  const choice = choiceFor(payload, wanted.choice);
  sheet.write(maps.heads, sizes[1], choice.softmax ? brightnessOf(sizes[0] * sizes[1], wanted.tokens) : scoreBrightness(wanted.tokens));
  const context = strip.canvas?.getContext("2d");
  if (!context) return;
  const { columns, side, above, gap, order, selected } = strip.plan;
  const ellipses = payload.of(layer, "centres") !== null && choice.prefix < 0; // outlines of tokens are drawn only for one head
  const frame = frameOf(sizes, [Math.floor(maps.query / sizes[1]), maps.query % sizes[1]], wanted.near);
  const height = heightOf(side, frame);
  const unit = Math.min(devicePixelRatio, 2);
  fit(context.canvas, [Math.ceil(maps.heads.length / columns) * (above + height + gap) - gap, columns * (side + gap) - gap], unit);
  order.forEach((head, index) => {
    const lines = linesOf(payload, { layer, head, query: maps.query }, maps.heads[head]!, choice, ellipses || head === selected ? wanted : { ...wanted, half: false, most: false });
    const at = [Math.floor(index / columns) * (above + height + gap) + above, (index % columns) * (side + gap)] as const;
    const scaled = { at: [at[0] * unit, at[1] * unit], size: [height * unit, side * unit] } as const;
    drawMap(context, sheet, head, { width: sizes[1], frame, lines, unit, ...scaled });
    strip.ends[head] = maps.largest[head]!;
  });
}

/** Write the largest value of each map above it. */
function caption(strip: Strip, softmax: boolean): void {
  strip.captions.forEach((element, head) => {
    const words = strip.words(strip.ends[head]!, softmax);
    if (element && element.textContent !== words) element.textContent = words;
  });
}

/** Set a canvas's size in CSS pixels, with `unit` canvas pixels per CSS pixel. */
function fit(canvas: HTMLCanvasElement, [height, width]: readonly [number, number], unit: number): void {
  const [down, across] = [Math.round(height * unit), Math.round(width * unit)];
  if (canvas.width === across && canvas.height === down) return;
  [canvas.width, canvas.height] = [across, down];
  [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
}
