/** State of the article: the step and the settings of its figure. */
import { STEPS } from "../article/steps";
import { BORDERS } from "../core/grid";
import { KERNELS } from "../core/kernels";
import { ALPHA } from "./bench";
import { clamped, read, written } from "./slice";

export interface ArticleState {
  /** 0 for the opening, then the steps from 1. */
  readonly step: number;
  /** Whether the opening plays; otherwise it shows the time `progress` (0 to 1) of `round`. */
  readonly playing: boolean;
  readonly progress: number;
  readonly round: number;
  /** (row, column) of the query, clamped in figures with smaller images; empty for the middle. */
  readonly query: readonly number[];
  /** Whether the query is locked: it then ignores pointer movements. */
  readonly frozen: boolean;
  /** Number of a convolution's shifts that are summed so far. */
  readonly shifts: number;
  /** Seed of the permutation of the pixels; 0 for none. */
  readonly shuffle: number;
  /** Whether the heads use positions in addition to content. */
  readonly positions: boolean;
  /** 1 or 0 for each of the four terms of the score: whether it is included. */
  readonly terms: readonly number[];
  /** Sharpness of the heads in 1 / pixel^2. */
  readonly alpha: number;
  /** Centre of the figure's head, (row, column) in pixels from its query. */
  readonly centre: readonly number[];
  readonly kernel: string;
  /** Offset of each centre from its tap, (row, column) pairs in pixels; empty if all are 0. */
  readonly offsets: readonly number[];
  /** Removed heads. */
  readonly missing: readonly number[];
  readonly border: string;
  /** Weight of content in the score of the last step's head. */
  readonly content: number;
}

const COMMON: Omit<ArticleState, "step"> = {
  playing: true,
  progress: 0,
  round: 0,
  query: [10, 13],
  frozen: false,
  shifts: 9,
  shuffle: 0,
  positions: false,
  terms: [1, 1, 1, 1],
  alpha: 1,
  centre: [-1, 1],
  kernel: "sharpen",
  offsets: [],
  missing: [],
  border: "renormalise",
  content: 0,
};

/** Largest distance of the head's centre from its query along an axis, in pixels. */
export const FARTHEST_CENTRE = 4;
/** Largest weight of content in the last step. */
export const MOST_CONTENT = 400;
const TAPS = 9;
const LARGEST_GRID = 64;

const legal = (step: number): number => clamped(step, 0, STEPS.length, 1);

/** Return the initial state of a step. */
export function atStep(step: number): ArticleState {
  const number = legal(step);
  return { ...COMMON, ...STEPS[number - 1]?.settings, step: number };
}

export const ARTICLE: ArticleState = atStep(0);

/** Write the step, and the settings that the reader changed, for a link. */
export const writtenArticle = (state: ArticleState): string[] =>
  written("article", state, { ...atStep(state.step), step: 0 });

export function readArticle(values: URLSearchParams): ArticleState {
  const { step } = read("article", values, { step: 0 });
  return checkedArticle({ ...read("article", values, atStep(step)), step });
}

/** Restrict a state from a link or an input field to valid values. */
export function checkedArticle(state: ArticleState): ArticleState {
  const step = legal(state.step);
  const standard = atStep(step);
  const known = (name: "kernel" | "border", names: readonly string[]): string =>
    names.includes(state[name]) ? state[name] : standard[name];
  return {
    ...state,
    step,
    query: state.query.length === 2 ? state.query.map((place) => clamped(place, 0, LARGEST_GRID - 1, 1)) : [],
    progress: clamped(state.progress, 0, 1),
    round: clamped(state.round, 0, 999, 1),
    shifts: clamped(state.shifts, 1, TAPS, 1),
    shuffle: clamped(state.shuffle, 0, 999, 1),
    terms: [0, 1, 2, 3].map((term) => (state.terms[term] === 0 ? 0 : 1)),
    alpha: clamped(state.alpha, ALPHA.low, ALPHA.high),
    centre: [0, 1].map((axis) => clamped(state.centre[axis] ?? 0, -FARTHEST_CENTRE, FARTHEST_CENTRE)),
    kernel: known("kernel", KERNELS),
    offsets: state.offsets.length === 2 * TAPS ? state.offsets.map((offset) => clamped(offset, -3, 3)) : [],
    missing: state.missing.filter((head) => Number.isInteger(head) && head >= 0 && head < TAPS),
    border: known("border", BORDERS),
    content: clamped(state.content, 0, MOST_CONTENT),
  };
}
