/**
 * All maps that the page shows, painted together once before each picture of the screen.
 *
 * The pointer may report hundreds of places a second; only the last one before a picture is computed. Strips that are
 * scrolled out of sight are left out, unless a common scale asks for their largest value.
 */
import { type Choice, type Maps, carried, choiceFor, emptyMaps, fillMaps, finest } from "../core/maps";
import type { Payload } from "../core/payload";
import { type Marks, Sheet, drawMap, frameOf, heightOf, linesOf } from "./maps";

/** How far below the largest score of its map a score is still told apart: exp(-12) = 0.000006. */
export const DEPTH = 12;

export interface Wanted extends Marks {
  /** (row, column) on a grid of these sizes. */
  readonly query: readonly [number, number];
  readonly grid: readonly [number, number];
  readonly choice: Choice;
  readonly common: boolean;
  /** Only what lies around the query of grids that are large. */
  readonly near: boolean;
}

/** How maps lie on their canvas, in CSS pixels. */
export interface Plan {
  readonly columns: number;
  /** Width of a map. */
  readonly side: number;
  /** Height of the title above a map. */
  readonly above: number;
  readonly gap: number;
}

/** The maps of one layer on the page. */
export class Strip {
  readonly maps: Maps;
  /** One for all maps: the browser's work for a canvas is more than that for its pixels. */
  canvas: HTMLCanvasElement | null = null;
  /** Elements that take the largest value of a map, in words. */
  readonly captions: (HTMLElement | null)[] = [];
  /** What they are to say: the largest probability, or the least score. */
  readonly ends: Float64Array;
  readonly sheet = new Sheet();
  visible = false;
  plan: Plan = { columns: 1, side: 0, above: 0, gap: 0 };

  constructor(
    readonly payload: Payload,
    readonly layer: number,
    /** Told why there are no maps, in words; empty where there are. */
    readonly lacks: (words: string) => void,
    readonly words: (largest: number) => string,
  ) {
    this.maps = emptyMaps(payload.manifest.layers[layer]!);
    this.ends = new Float64Array(payload.manifest.layers[layer]!.heads);
  }
}

export class Atlas {
  private readonly strips = new Set<Strip>();
  private wanted: Wanted | null = null;
  /** Whether the maps are to be painted anew. */
  private asked = false;
  private frame = 0;
  /** Whose captions are behind their maps. */
  private readonly behind = new Set<Strip>();

  /** `limits` is told the ends of the common scale, or the least and largest ends among the maps in sight. */
  constructor(private readonly limits: (low: number, high: number) => void) {}

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

  /** Paints before the next picture of the screen. */
  soon(): void {
    this.asked = true;
    this.next();
  }

  /** Paints no more: the view is gone, and what `limits` and the strips would read with it. */
  stop(): void {
    cancelAnimationFrame(this.frame);
  }

  private next(): void {
    if (this.frame === 0) this.frame = requestAnimationFrame(() => this.step());
  }

  /** Maps with every picture of the screen, captions of one layer: laying out their words takes longer than the maps. */
  private step(): void {
    this.frame = 0;
    const asked = this.asked;
    this.asked = false;
    if (asked) this.paint();
    const [first] = this.behind;
    if (first === undefined) return;
    this.behind.delete(first);
    caption(first);
    if (this.behind.size > 0) this.next();
  }

  private paint(): void {
    const { wanted } = this;
    if (wanted === null) return;
    let [low, high] = [0, 0]; // scores end at 0, probabilities begin there
    const shown = [...this.strips].filter((strip) => strip.visible || wanted.common);
    for (const strip of shown) {
      fill(strip, wanted);
      strip.lacks(strip.maps.lack);
      if (strip.maps.lack) continue;
      high = Math.max(high, ...strip.maps.largest);
      low = Math.min(low, ...strip.maps.least);
    }
    low = Math.max(low, -DEPTH);
    for (const strip of shown) {
      if (!strip.visible || strip.maps.lack) continue;
      draw(strip, wanted, [low, high]);
      this.behind.add(strip);
    }
    this.limits(low, high);
  }
}

function fill(strip: Strip, wanted: Wanted): void {
  const { payload, layer, maps } = strip;
  const { sizes } = payload.manifest.layers[layer]!;
  const grid = finest(payload);
  const place = carried(carried(wanted.query, wanted.grid, grid), grid, sizes);
  fillMaps(maps, payload, layer, place[0] * sizes[1] + place[1], choiceFor(payload, wanted.choice));
}

function draw(strip: Strip, wanted: Wanted, common: readonly [number, number]): void {
  const { payload, layer, maps, sheet } = strip;
  const { sizes } = payload.manifest.layers[layer]!;
  const choice = choiceFor(payload, wanted.choice);
  const own = (head: number): readonly [number, number] =>
    choice.softmax ? [0, maps.largest[head]!] : [Math.max(maps.least[head]!, -DEPTH), 0];
  sheet.write(maps.heads, sizes[1], wanted.common ? () => common : own);
  const context = strip.canvas?.getContext("2d");
  if (!context) return;
  const { columns, side, above, gap } = strip.plan;
  const frame = frameOf(sizes, [Math.floor(maps.query / sizes[1]), maps.query % sizes[1]], wanted.near);
  const height = heightOf(side, frame);
  const unit = Math.min(devicePixelRatio, 2);
  fit(context.canvas, [Math.ceil(maps.heads.length / columns) * (above + height + gap) - gap, columns * (side + gap) - gap], unit);
  maps.heads.forEach((map, head) => {
    const lines = linesOf(payload, { layer, head, query: maps.query }, map, choice, wanted);
    const at = [Math.floor(head / columns) * (above + height + gap) + above, (head % columns) * (side + gap)] as const;
    const scaled = { at: [at[0] * unit, at[1] * unit], size: [height * unit, side * unit] } as const;
    drawMap(context, sheet, head, { width: sizes[1], frame, lines, unit, ...scaled });
    strip.ends[head] = choice.softmax ? maps.largest[head]! : maps.least[head]!;
  });
}

/** Writes the ends of the maps above them. */
function caption(strip: Strip): void {
  strip.captions.forEach((element, head) => {
    const words = strip.words(strip.ends[head]!);
    if (element && element.textContent !== words) element.textContent = words;
  });
}

/** Gives a canvas its size in CSS pixels, and `unit` times as many of its own. */
function fit(canvas: HTMLCanvasElement, [height, width]: readonly [number, number], unit: number): void {
  const [down, across] = [Math.round(height * unit), Math.round(width * unit)];
  if (canvas.width === across && canvas.height === down) return;
  [canvas.width, canvas.height] = [across, down];
  [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
}
