import { describe, expect, test } from "vitest";
import { ROUNDS, SECONDS, layerAt, roundOf } from "../src/article/opening";
import { result } from "../src/core/bench";
import { atStep } from "../src/state/article";
import { START, fromHash, reduce, toHash } from "../src/state/state";

const rounds = Array.from({ length: 3 * ROUNDS }, (_, number) => number);

describe("the opening", () => {
  test.each(rounds)("round %i begins with heads at nine places several pixels away, and ends as the convolution", (number) => {
    const round = roundOf(number);
    expect(roundOf(number)).toEqual(round);
    const first = layerAt(round, 0);
    const far = first.heads.centres.map(([row, column]) => Math.hypot(row, column));
    expect(Math.min(...far)).toBeGreaterThan(2);
    first.heads.centres.forEach(([row, column], head) => {
      const others = first.heads.centres.filter((_, other) => other !== head);
      expect(Math.min(...others.map(([down, right]) => Math.hypot(row - down, column - right)))).toBeGreaterThan(0.5);
    });
    const last = layerAt(round, 1);
    expect(last.heads.centres).toEqual(last.shifts);
    expect(result(last).error).toBeLessThan(1e-12);
  });

  test("heads sharpen all the time, and the scales of the pictures stay the same", () => {
    const times = [0, 0.25, 0.5, 0.75, 1].map((time) => layerAt(roundOf(0), time));
    const alphas = times.map(({ heads }) => heads.alpha);
    expect([...alphas].sort((one, other) => one - other)).toEqual(alphas);
    expect(new Set(times.map((layer) => result(layer).scale)).size).toBe(1);
  });

  test.each(rounds)("round %i: the difference has faded after five seconds", (number) => {
    const round = roundOf(number);
    const error = (seconds: number): number => result(layerAt(round, seconds / SECONDS.motion)).error;
    expect(error(5)).toBeLessThan(1e-3 * error(0));
  });

  test("a link restores the time and the round where it was paused", () => {
    const state = reduce(START, { type: "article", change: { ...atStep(0), playing: false, progress: 0.625, round: 5 } });
    expect(toHash(state)).toBe("#view=article&article.playing=false&article.progress=0.625&article.round=5");
    expect(fromHash(toHash(state))).toEqual(state);
  });
});
