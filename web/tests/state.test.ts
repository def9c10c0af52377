import { expect, test } from "vitest";
import { START, type State, fromHash, reduce, toHash, viewIn } from "../src/state/state";

test("the initial state has a short link", () => {
  expect(toHash(START)).toBe("#view=article");
  expect(fromHash("")).toEqual(START);
});

test("a link's view has priority over the initial view", () => {
  expect(fromHash("", "model").view).toBe("model");
  expect(fromHash("#view=nowhere&bench.alpha=3", "model").view).toBe("model");
  expect(fromHash("#view=bench", "model").view).toBe("bench");
  expect([viewIn(""), viewIn("#view=nowhere"), viewIn("#view=article")]).toEqual([null, null, "article"]);
});

test("a link restores the state", () => {
  let state: State = reduce(START, { type: "view", view: "bench" });
  state = reduce(state, { type: "bench", change: { alpha: 3.25 } });
  state = reduce(state, { type: "article", change: { step: 4, playing: false, progress: 0.25, round: 3 } });
  state = reduce(state, { type: "model", change: { query: [3, 30], part: "content", time: 4, zoomed: true, sort: "best row", layerSort: "score", layerDown: false } });
  expect(fromHash(toHash(state))).toEqual(state);
});

test("invalid indices in a link are clamped", () => {
  const { model } = fromHash("#model.query=3,-7.6&model.key=1,2,3&model.part=all&model.time=-9&model.layer=1e99");
  expect([model.query, model.key, model.part, model.time, model.layer]).toEqual([[3, 0], [], "both", -1, 4096]);
});

test("an invalid link opens the page", () => {
  expect(fromHash("#view=nowhere&bench.alpha=much&article.step=-3.7&model.layer=")).toEqual(START);
  expect(fromHash(`#bench.alpha=${"9".repeat(9999)}`)).toEqual(START);
});
