/** Drawing of attention maps: colours without smoothing, then contours, centre and query as lines. */
import { type Ellipse, type Gaussian, gaussianContour, levelOf, meanOf, outline } from "../core/contours";
import { gaussianAt } from "../core/gaussians";
import type { Payload } from "../core/payload";
import { type Choice, type HeadQuery, probabilities } from "../core/maps";
import { table } from "./colours";

export interface Marks {
  readonly centres: boolean;
  readonly half: boolean;
  readonly most: boolean;
}

/** Lines on a map. Positions are (row, column), with integers at the centres of tokens. */
export interface Lines {
  /** null if the query is not a token of the image. */
  readonly query: readonly [number, number] | null;
  readonly key?: readonly [number, number];
  readonly centre: readonly [number, number] | null;
  readonly contours: readonly Contour[];
  /** Probabilities for the contours. The array is reused by the next call of `linesOf`. */
  readonly shares: Float64Array;
}
interface Contour {
  readonly ellipse: Ellipse | null;
  /** Level of the outline if there is no ellipse. */
  readonly level: number;
  readonly dashed: boolean;
}

/** The visible part of a grid, in tokens: the whole grid, or the tokens around the query. */
export interface Frame {
  readonly top: number;
  readonly left: number;
  readonly rows: number;
  readonly columns: number;
}

/** CSS pixels: a map of a layer with one axis has only one row, which would be too low to see or click. */
export const LEAST_HEIGHT = 24;

/** Return the height in CSS pixels of a map of this width: tokens are squares, unless the map would be too low. */
export function heightOf(width: number, { rows, columns }: Pick<Frame, "rows" | "columns">): number {
  return Math.max(LEAST_HEIGHT, Math.round((width * rows) / columns));
}

/** Tokens along each axis of a close-up, seven on each side of the query; shorter axes are shown completely. */
export const CLOSE = 15;

export function frameOf(sizes: readonly [number, number], query: readonly [number, number], near: boolean): Frame {
  const along = (axis: 0 | 1): [number, number] =>
    near && sizes[axis] > CLOSE ? [query[axis] - (CLOSE - 1) / 2, CLOSE] : [0, sizes[axis]];
  const [[top, rows], [left, columns]] = [along(0), along(1)];
  return { top, left, rows, columns };
}

const HALO = "rgb(0 0 0 / 65%)";
const OUTSIDE = "#8b9098"; // outside the image, in light and dark mode
const LINE = "#ffffff";
const QUERY_HALO = "#000000";
const DASH = [4, 3];
const DOTS = [2, 2];
const HUGE = 4; // in map widths: larger ellipses are drawn as outlines, since browsers compute dashes for the whole line

/** The coloured maps of a layer, side by side on a hidden canvas, for `drawMap`. */
export class Sheet {
  private readonly canvas = document.createElement("canvas");
  private picture: ImageData | null = null;

  /** Paint maps with the brightness of each value, from 0 to 1. */
  write(maps: readonly Float64Array[], width: number, brightness: (value: number) => number): void {
    const height = (maps[0]?.length ?? 0) / width;
    const across = width * maps.length;
    if (this.picture?.width !== across || this.picture.height !== height) {
      this.canvas.width = across;
      this.canvas.height = height;
      this.picture = new ImageData(across, height);
    }
    const words = new Uint32Array(this.picture.data.buffer);
    const colours = new Uint32Array(table("amount").buffer);
    maps.forEach((map, head) => {
      for (let key = 0, column = 0, at = head * width; key < map.length; key++) {
        words[at] = colours[(brightness(map[key]!) * 255 + 0.5) | 0]!;
        if (++column < width) at++;
        else [column, at] = [0, at + 1 + across - width];
      }
    });
    this.canvas.getContext("2d")?.putImageData(this.picture, 0, 0);
  }

  /** Copy the visible part of a map to the context's origin. */
  copy(context: CanvasRenderingContext2D, head: number, { width, frame, size: [down, across] }: Drawn): void {
    const [top, left] = [Math.max(0, frame.top), Math.max(0, frame.left)];
    const rows = Math.min(this.canvas.height, frame.top + frame.rows) - top;
    const columns = Math.min(width, frame.left + frame.columns) - left;
    const [x, y] = [across / frame.columns, down / frame.rows];
    if (rows < frame.rows || columns < frame.columns) {
      context.fillStyle = OUTSIDE;
      context.fillRect(0, 0, across, down);
    }
    context.imageSmoothingEnabled = false;
    const to = [(left - frame.left) * x, (top - frame.top) * y, columns * x, rows * y] as const;
    context.drawImage(this.canvas, head * width + left, top, columns, rows, ...to);
  }
}

let shares = new Float64Array(0);

/** Compute the centre and the contours of one head's map. */
export function linesOf(payload: Payload, place: HeadQuery, values: Float64Array, choice: Choice, marks: Marks): Lines {
  const width = payload.manifest.layers[place.layer]!.sizes[1];
  const query: [number, number] | null = choice.prefix < 0 ? [Math.floor(place.query / width), place.query % width] : null;
  let map = values;
  if (!marks.centres && !marks.half && !marks.most) return { query, centre: null, contours: [], shares: map };
  if (!choice.softmax) {
    if (shares.length !== map.length) shares = new Float64Array(map.length);
    map = probabilities(map, shares);
  }
  const gaussian = query && gaussianOf(payload, place, choice.time, query);
  const contour = (share: number, dashed: boolean): Contour => {
    const level = levelOf(map, share);
    return { ellipse: gaussian && gaussianContour(map, width, level, gaussian), level, dashed };
  };
  return {
    query,
    centre: marks.centres ? (gaussian?.centre ?? meanOf(map, width)) : null,
    contours: [...(marks.most ? [contour(0.9, true)] : []), ...(marks.half ? [contour(0.5, false)] : [])],
    shares: map,
  };
}

/** Return the Gaussian of a position-only head around a query; null if the head is not a Gaussian. */
function gaussianOf(payload: Payload, { layer, head }: HeadQuery, time: number, query: readonly [number, number]): Gaussian | null {
  const found = gaussianAt(payload, layer, head, time);
  return found && { ...found, centre: [query[0] + found.centre[0], query[1] + found.centre[1]] };
}

export interface Drawn {
  /** Tokens per row of the grid. */
  readonly width: number;
  readonly frame: Frame;
  readonly lines: Lines;
  /** (top, left) and (height, width) in canvas pixels. */
  readonly at: readonly [number, number];
  readonly size: readonly [number, number];
  /** Canvas pixels per unit of line width. */
  readonly unit: number;
}

/** Draw one map of a sheet and its lines. */
export function drawMap(context: CanvasRenderingContext2D, sheet: Sheet, index: number, drawn: Drawn): void {
  const { width, frame, lines, at, size } = drawn;
  context.save();
  context.translate(at[1], at[0]);
  context.beginPath();
  context.rect(0, 0, size[1], size[0]);
  context.clip();
  sheet.copy(context, index, drawn);
  const pen = new Pen(context, drawn);
  for (const { ellipse, level, dashed } of lines.contours) {
    context.beginPath();
    const small = ellipse && ellipse.axes[0] < HUGE * Math.max(frame.rows, frame.columns);
    if (small) pen.ellipse(ellipse);
    else outline(lines.shares, width, level, (...edge) => pen.edge(...edge));
    pen.stroke(dashed ? 1 : 1.8, dashed && small ? DASH : []);
  }
  if (lines.centre) pen.cross(lines.centre);
  if (lines.key) pen.square(lines.key, DOTS);
  if (lines.query) pen.square(lines.query);
  context.restore();
}

/** Draws in grid coordinates, with integers at the centres of tokens. */
class Pen {
  private readonly x: number;
  private readonly y: number;
  private readonly frame: Frame;
  private readonly unit: number;

  constructor(
    private readonly context: CanvasRenderingContext2D,
    { frame, size, unit }: Drawn,
  ) {
    this.frame = frame;
    this.unit = unit;
    this.x = size[1] / frame.columns;
    this.y = size[0] / frame.rows;
  }

  ellipse({ centre, axes, angle }: Ellipse): void {
    this.context.save();
    this.context.scale(this.x, this.y);
    this.context.ellipse(this.across(centre[1]) / this.x, this.down(centre[0]) / this.y, axes[0], axes[1], angle, 0, 2 * Math.PI);
    this.context.restore(); // the path keeps its shape, but the line width is not scaled
  }

  /** Add a line along the edges of tokens, from corner to corner. */
  edge(row: number, column: number, toRow: number, toColumn: number): void {
    this.context.moveTo(this.across(column - 0.5), this.down(row - 0.5));
    this.context.lineTo(this.across(toColumn - 0.5), this.down(toRow - 0.5));
  }

  cross(place: readonly [number, number]): void {
    const [x, y] = [this.across(place[1]), this.down(place[0])];
    const arm = 3.5 * this.unit;
    this.context.beginPath();
    this.context.moveTo(x - arm, y);
    this.context.lineTo(x + arm, y);
    this.context.moveTo(x, y - arm);
    this.context.lineTo(x, y + arm);
    this.stroke(1.2);
  }

  /** Draw a square around a token, at least five line widths wide. */
  square(place: readonly [number, number], dash: readonly number[] = []): void {
    const [width, height] = [Math.max(this.x, 5 * this.unit), Math.max(this.y, 5 * this.unit)];
    this.context.beginPath();
    this.context.rect(this.across(place[1]) - width / 2, this.down(place[0]) - height / 2, width, height);
    this.stroke(1.6, dash, dash.length > 0 ? HALO : QUERY_HALO);
  }

  stroke(lines: number, dash: readonly number[] = [], halo = HALO): void {
    const { context, unit } = this;
    context.setLineDash([]);
    context.strokeStyle = halo;
    context.lineWidth = (lines + 1.6) * unit;
    context.stroke();
    context.setLineDash(dash.map((length) => length * unit));
    context.strokeStyle = LINE;
    context.lineWidth = lines * unit;
    context.stroke();
  }

  private across(column: number): number {
    return (column + 0.5 - this.frame.left) * this.x;
  }

  private down(row: number): number {
    return (row + 0.5 - this.frame.top) * this.y;
  }
}
