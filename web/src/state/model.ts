/** State of the model explorer. It is independent of the payload: indices beyond the payload are clamped where they are used. */
import { PARTS } from "../core/rows";
import { clamped } from "./slice";

export interface ModelState {
  /** The enlarged head if `zoomed`. */
  readonly layer: number;
  readonly head: number;
  readonly zoomed: boolean;
  /** Whether the enlarged head is one of the second model. */
  readonly other: boolean;
  /** (row, column) on the finest grid of the payload; empty for its middle. */
  readonly query: readonly number[];
  /** Whether the query is locked: it then ignores pointer movements. */
  readonly frozen: boolean;
  /** Index of the class token or register that is the query; -1 if the query is a token of the image. */
  readonly prefix: number;
  /** (row, column) of the key in the formula, on its layer's grid; empty for the strongest key. */
  readonly key: readonly number[];
  /** Scores that enter the softmax: one of `PARTS`. */
  readonly part: string;
  /** Whether the maps show probabilities or the scores before the softmax. */
  readonly softmax: boolean;
  readonly image: number;
  /** Whether the maps show the mean over all images or one image. */
  readonly mean: boolean;
  readonly centres: boolean;
  /** Whether contours of 50% (`half`) and 90% (`most`) of the probability are shown. */
  readonly half: boolean;
  readonly most: boolean;
  /** Whether the maps show only the tokens around the query. */
  readonly near: boolean;
  /** Index of the training snapshot, between two snapshots while the film plays; -1 for the last. */
  readonly time: number;
  /** File of the page's own model that is shown; empty for the payload that came with the page or was opened. */
  readonly own: string;
  /** The same for the second model; empty if there is none or it was opened by the visitor. */
  readonly second: string;
  /** Changed heads of the first model, see `changesIn`. */
  readonly changed: string;
  /** Sort column of the table of heads; empty for the model's order. */
  readonly sort: string;
  readonly down: boolean;
  /** The same for the table of layers. */
  readonly layerSort: string;
  readonly layerDown: boolean;
}

export const MODEL: ModelState = {
  layer: 0,
  head: 0,
  zoomed: false,
  other: false,
  query: [],
  frozen: false,
  prefix: -1,
  key: [],
  part: "both",
  softmax: true,
  image: 0,
  mean: false,
  centres: true,
  half: false,
  most: true,
  near: false,
  time: -1,
  own: "",
  second: "",
  changed: "",
  sort: "",
  down: true,
  layerSort: "",
  layerDown: true,
};

const LARGEST = 4096; // of any index; payloads have far fewer layers, heads and tokens along an axis

/** Restrict a state from a link to valid values. */
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
    prefix: clamped(state.prefix, -1, LARGEST, 1),
    time: state.time < 0 ? -1 : clamped(state.time, 0, LARGEST),
  };
}
