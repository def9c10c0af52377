/** Where the reader of the article is. */
export interface ArticleState {
  readonly step: number;
}

export const ARTICLE: ArticleState = { step: 0 };

/** A state that came from a link, made legal. */
export function checkedArticle(state: ArticleState): ArticleState {
  return { step: Math.max(0, Math.round(state.step)) };
}
