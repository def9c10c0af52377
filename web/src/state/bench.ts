/** What the theorem bench shows. */
export interface BenchState {
  readonly alpha: number;
}

export const BENCH: BenchState = { alpha: 2 };

/** A state that came from a link, made legal. */
export function checkedBench(state: BenchState): BenchState {
  return state;
}
