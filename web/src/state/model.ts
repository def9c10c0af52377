/** What the model explorer shows. A payload is not known here: numbers beyond it are moved into it where they are used. */
import { PARTS } from "../core/rows";
import { clamped } from "./slice";

export interface ModelState {
  /** The head that is enlarged, if `zoomed`. */
  readonly layer: number;
  readonly head: number;
  readonly zoomed: boolean;
  /** (row, column) in tokens of the finest grid of the payload; empty for its middle. */
  readonly query: readonly number[];
  /** Whether the query stays where it is when the pointer moves. */
  readonly frozen: boolean;
  /** (row, column) of the key whose number is explained, in tokens of its layer; empty for the strongest. */
  readonly key: readonly number[];
  /** Which scores the softmax sees: one of `PARTS`. */
  readonly part: string;
  /** Probabilities, or the scores before the softmax. */
  readonly softmax: boolean;
  readonly image: number;
  /** The mean over all images instead of one. */
  readonly mean: boolean;
  /** One colour scale for all maps, or one for each. */
  readonly common: boolean;
  readonly centres: boolean;
  /** Contours of the smallest sets of pixels that hold 50 % and 90 %. */
  readonly half: boolean;
  readonly most: boolean;
  /** Maps show what lies around the query instead of the whole image. */
  readonly near: boolean;
  /** Moment of the training; -1 for the last. */
  readonly time: number;
  /** Column that the table of heads is sorted by; empty for the model's order. */
  readonly sort: string;
  readonly down: boolean;
  /** The same of the table of layers. */
  readonly layerSort: string;
  readonly layerDown: boolean;
}

export const MODEL: ModelState = {
  layer: 0,
  head: 0,
  zoomed: false,
  query: [],
  frozen: false,
  key: [],
  part: "both",
  softmax: true,
  image: 0,
  mean: false,
  common: false,
  centres: true,
  half: false,
  most: true,
  near: false,
  time: -1,
  sort: "",
  down: true,
  layerSort: "",
  layerDown: true,
};

const LARGEST = 4096; // of any index; a payload has far fewer layers, heads and tokens along an axis

/** A state that came from a link, made legal. */
export function checkedModel(state: ModelState): ModelState {
  const place = (pair: readonly number[]): readonly number[] =>
    pair.length === 2 ? pair.map((at) => clamped(at, 0, LARGEST, 1)) : [];
  return {
    ...state,
    layer: clamped(state.layer, 0, LARGEST, 1),
    head: clamped(state.head, 0, LARGEST, 1),
    query: place(state.query),
    key: place(state.key),
    part: PARTS.find((part) => part === state.part) ?? MODEL.part,
    image: clamped(state.image, 0, LARGEST, 1),
    time: clamped(state.time, -1, LARGEST, 1),
  };
}
