import type { Payload } from "../../core/payload";
import type { ArticleState } from "../../state/article";
import type { Dispatch, State } from "../../state/state";

/** Props of all figures of the article. */
export interface FigureProps {
  article: ArticleState;
  change: (changed: Partial<ArticleState>) => void;
  payload: Payload | null;
  shown: State;
  dispatch: Dispatch;
}
