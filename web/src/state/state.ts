/** The state of the page, its reducer, and its encoding in the URL's hash. */
import { ARTICLE, type ArticleState, checkedArticle, readArticle, writtenArticle } from "./article";
import { BENCH, type BenchState, checkedBench } from "./bench";
import { MODEL, type ModelState, checkedModel } from "./model";
import { read, written } from "./slice";

export const VIEWS = ["article", "model", "bench"] as const;
export type View = (typeof VIEWS)[number];

export interface State {
  readonly view: View;
  readonly bench: BenchState;
  readonly model: ModelState;
  readonly article: ArticleState;
}

export type Action =
  | { type: "view"; view: View }
  | { type: "bench"; change: Partial<BenchState> }
  | { type: "model"; change: Partial<ModelState> }
  | { type: "article"; change: Partial<ArticleState> }
  | { type: "restore"; state: State };

export type Dispatch = (action: Action) => void;

/** The initial state without a payload: the article. */
export const START: State = { view: "article", bench: BENCH, model: MODEL, article: ARTICLE };

export function reduce(state: State, action: Action): State {
  switch (action.type) {
    case "view":
      return { ...state, view: action.view };
    case "bench":
      return { ...state, bench: checkedBench({ ...state.bench, ...action.change }) };
    case "model":
      return { ...state, model: checkedModel({ ...state.model, ...action.change }) };
    case "article":
      return { ...state, article: checkedArticle({ ...state.article, ...action.change }) };
    case "restore":
      return action.state;
  }
}

export function toHash(state: State): string {
  const parts = [
    `view=${state.view}`,
    ...written("bench", state.bench, BENCH),
    ...written("model", state.model, MODEL),
    ...writtenArticle(state.article),
  ];
  return `#${parts.join("&")}`;
}

/** Return the view that a link names, or null. */
export function viewIn(hash: string): View | null {
  const named = new URLSearchParams(hash.replace(/^#/, "")).get("view");
  return VIEWS.find((view) => view === named) ?? null;
}

/** Decode the state from a link; `home` is the view if the link names none. */
export function fromHash(hash: string, home: View = START.view): State {
  const values = new URLSearchParams(hash.replace(/^#/, ""));
  return {
    view: viewIn(hash) ?? home,
    bench: checkedBench(read("bench", values, BENCH)),
    model: checkedModel(read("model", values, MODEL)),
    article: readArticle(values),
  };
}
