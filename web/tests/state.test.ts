import { expect, test } from "vitest";
import { START, type State, fromHash, reduce, toHash } from "../src/state/state";

test("what the page starts with is a short link", () => {
  expect(toHash(START)).toBe("#view=bench");
  expect(fromHash("")).toEqual(START);
});

test("a state survives its link", () => {
  let state: State = reduce(START, { type: "view", view: "article" });
  state = reduce(state, { type: "bench", change: { alpha: 3.25 } });
  state = reduce(state, { type: "article", change: { step: 4 } });
  expect(fromHash(toHash(state))).toEqual(state);
});

test("a link that does not parse opens the page", () => {
  expect(fromHash("#view=nowhere&bench.alpha=much&article.step=-3.7&model.layer=")).toEqual(START);
  expect(fromHash(`#bench.alpha=${"9".repeat(9999)}`)).toEqual(START);
});
