/** The maps of a layer on one canvas for each head: pixels without smoothing, then contours, centre and query as lines. */
import { type Ellipse, type Gaussian, gaussianContour, levelOf, meanOf, outline } from "../core/contours";
import type { Payload } from "../core/payload";
import { type Choice, type HeadQuery, probabilities } from "../core/maps";
import { table } from "./colours";

export interface Marks {
  readonly centres: boolean;
  readonly half: boolean;
  readonly most: boolean;
}

/** What lines on a map say: fractional places are (row, column), whole numbers the middles of pixels. */
export interface Lines {
  readonly query: readonly [number, number];
  readonly key?: readonly [number, number];
  readonly centre: readonly [number, number] | null;
  readonly contours: readonly Contour[];
  /** The probabilities that the contours are of; good until the next lines are made. */
  readonly shares: Float64Array;
}
interface Contour {
  readonly ellipse: Ellipse | null;
  /** Of the outline, where there is no ellipse. */
  readonly level: number;
  readonly dashed: boolean;
}

const HALO = "#000000";
const MARK = "#ffb000";
const LINE = "#ffffff";
const DASH = [4, 3];

/** Colours of `maps` from a value low to a value high, one map beside the other, for `drawMap`. */
export class Sheet {
  private readonly canvas = document.createElement("canvas");
  private picture: ImageData | null = null;

  write(maps: readonly Float64Array[], width: number, limits: (head: number) => readonly [number, number]): void {
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
      const [low, high] = limits(head);
      const factor = high > low ? 255 / (high - low) : 0;
      for (let key = 0, column = 0, at = head * width; key < map.length; key++) {
        const step = Math.round((map[key]! - low) * factor);
        words[at] = colours[step < 0 ? 0 : step > 255 ? 255 : step]!;
        if (++column < width) at++;
        else [column, at] = [0, at + 1 + across - width];
      }
    });
    this.canvas.getContext("2d")?.putImageData(this.picture, 0, 0);
  }

  /** Copies one map onto a canvas of any size. */
  copy(context: CanvasRenderingContext2D, head: number, sizes: readonly [number, number]): void {
    const [height, width] = sizes;
    context.imageSmoothingEnabled = false;
    context.drawImage(this.canvas, head * width, 0, width, height, 0, 0, context.canvas.width, context.canvas.height);
  }
}

let shares = new Float64Array(0);

/** Centre and contours of one head's map. */
export function linesOf(payload: Payload, place: HeadQuery, values: Float64Array, choice: Choice, marks: Marks): Lines {
  const width = payload.manifest.layers[place.layer]!.sizes[1];
  const query: [number, number] = [Math.floor(place.query / width), place.query % width];
  let map = values;
  if (!marks.centres && !marks.half && !marks.most) return { query, centre: null, contours: [], shares: map };
  if (!choice.softmax) {
    if (shares.length !== map.length) shares = new Float64Array(map.length);
    map = probabilities(map, shares);
  }
  const gaussian = gaussianOf(payload, place, choice.time, query);
  const contour = (share: number, dashed: boolean): Contour => ({
    ellipse: gaussian && gaussianContour(map, width, share, gaussian),
    level: levelOf(map, share),
    dashed,
  });
  return {
    query,
    centre: marks.centres ? (gaussian?.centre ?? meanOf(map, width)) : null,
    contours: [...(marks.most ? [contour(0.9, true)] : []), ...(marks.half ? [contour(0.5, false)] : [])],
    shares: map,
  };
}

/** The Gaussian of a head that looks at positions alone, seen from a query; null where it has none. */
function gaussianOf(
  payload: Payload,
  { layer, head }: HeadQuery,
  time: number,
  query: readonly [number, number],
): Gaussian | null {
  const { kind, heads } = payload.manifest.layers[layer]!;
  const centres = payload.of(layer, "centres");
  const precision = payload.of(layer, "precision");
  if (kind !== "positions" || centres === null || precision === null) return null;
  const at = time * heads + head;
  return {
    centre: [query[0] + centres.data[2 * at]!, query[1] + centres.data[2 * at + 1]!],
    precision: precision.data.subarray(4 * at, 4 * at + 4),
  };
}

/** Draws one map and its lines; `unit` is canvas pixels for one CSS pixel. */
export function drawMap(
  context: CanvasRenderingContext2D,
  sheet: Sheet,
  index: number,
  { sizes, lines, unit }: { sizes: readonly [number, number]; lines: Lines; unit: number },
): void {
  sheet.copy(context, index, sizes);
  const scale: [number, number] = [context.canvas.width / sizes[1], context.canvas.height / sizes[0]];
  for (const contour of lines.contours) {
    context.beginPath();
    if (contour.ellipse) trace(context, contour.ellipse, scale);
    else outline(lines.shares, sizes[1], contour.level, (row, column, toRow, toColumn) => {
      context.moveTo(column * scale[0], row * scale[1]);
      context.lineTo(toColumn * scale[0], toRow * scale[1]);
    });
    stroke(context, LINE, unit, contour.dashed && contour.ellipse ? DASH : []);
  }
  if (lines.centre) {
    const [x, y] = [(lines.centre[1] + 0.5) * scale[0], (lines.centre[0] + 0.5) * scale[1]];
    const arm = 4 * unit;
    context.beginPath();
    context.moveTo(x - arm, y);
    context.lineTo(x + arm, y);
    context.moveTo(x, y - arm);
    context.lineTo(x, y + arm);
    stroke(context, LINE, 1.5 * unit);
  }
  if (lines.key) square(context, lines.key, scale, LINE, unit);
  square(context, lines.query, scale, MARK, unit);
}

function trace(context: CanvasRenderingContext2D, { centre, axes, angle }: Ellipse, scale: readonly [number, number]): void {
  context.save();
  context.scale(...(scale as [number, number]));
  context.ellipse(centre[1] + 0.5, centre[0] + 0.5, axes[0], axes[1], angle, 0, 2 * Math.PI);
  context.restore(); // the path keeps its shape, lines get their width from the canvas
}

/** A square around a pixel, never under five CSS pixels wide. */
function square(
  context: CanvasRenderingContext2D,
  place: readonly [number, number],
  scale: readonly [number, number],
  colour: string,
  unit: number,
): void {
  const [width, height] = scale.map((side) => Math.max(side, 5 * unit)) as [number, number];
  context.beginPath();
  context.rect((place[1] + 0.5) * scale[0] - width / 2, (place[0] + 0.5) * scale[1] - height / 2, width, height);
  stroke(context, colour, 1.5 * unit);
}

function stroke(context: CanvasRenderingContext2D, colour: string, width: number, dash: number[] = []): void {
  context.setLineDash([]);
  context.strokeStyle = HALO;
  context.lineWidth = 2.2 * width;
  context.stroke();
  context.setLineDash(dash.map((length) => length * width));
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.stroke();
}
