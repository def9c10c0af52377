import { describe, expect, test } from "vitest";
import { decisive, headToMiss, moved, result, setup } from "../src/core/bench";
import { KERNELS, kernelNamed } from "../src/core/kernels";
import { PHOTOGRAPHS, photographNamed } from "../src/core/photographs";
import { BORDERS } from "../src/core/grid";
import { around } from "../src/core/theorem";
import { percent, shortNumber, strongest, strongestKeys } from "../src/core/format";
import { BENCH, type BenchState, asTrained, checkedBench, hard, oneMissing } from "../src/state/bench";
import { fromHash, reduce, START, toHash } from "../src/state/state";

const computed = (change: Partial<BenchState>) => result(setup(checkedBench({ ...BENCH, ...change }), null));

describe("the workbench", () => {
  test.each(KERNELS)("hard heads equal %s under every border rule, stride and dilation", (kernel) => {
    for (const border of BORDERS) {
      for (const width of [3, 5]) {
        const { error, bound } = computed({ ...hard(), kernel, border, width, size: 32, stride: width - 2, dilation: 2 });
        expect(error).toBeLessThan(1e-13);
        expect(error).toBeLessThanOrEqual(bound.total);
      }
    }
  });

  test.each(PHOTOGRAPHS)("soft, displaced and missing heads stay below the bound on %s", (picture) => {
    for (const change of [asTrained(BENCH), oneMissing(4), { alpha: 0.1 }, { alpha: 5, offsets: moved(BENCH, 1, [2, -1]) }]) {
      const { error, bound } = computed({ ...change, picture });
      expect(error).toBeGreaterThan(1e-3);
      expect(error).toBeLessThanOrEqual(bound.total);
    }
  });

  test("outputs are recomputed if a centre moves, but not if the query moves", () => {
    expect(decisive({ ...BENCH, query: [1, 2], head: 0, frozen: true })).toBe(decisive(BENCH));
    expect(decisive({ ...BENCH, offsets: moved(BENCH, 0, [0.5, 0]) })).not.toBe(decisive(BENCH));
  });

  test("a centre that is moved back is not in the link", () => {
    expect(moved({ ...BENCH, offsets: moved(BENCH, 2, [1, 0]) }, 2, [0, 0])).toEqual([]);
  });

  test("the head to remove is the selected one, unless its weight is 0", () => {
    expect(headToMiss({ ...BENCH, kernel: "identity", head: 0 })).toBe(4);
    expect(headToMiss({ ...BENCH, kernel: "box", head: 7 })).toBe(7);
  });
});

test.each([3, 5])("weights sum to 1, or 0 for edge detection (size %i)", (width) => {
  for (const name of KERNELS) {
    const sum = kernelNamed(name, width).reduce((total, weight) => total + weight, 0);
    expect(sum).toBeCloseTo(name === "edge" ? 0 : 1, 12);
  }
});

test.each(PHOTOGRAPHS)("%s is scaled down by areas, with grey levels from its colours", (name) => {
  const mean = (values: ArrayLike<number>): number => Array.from(values).reduce((sum, value) => sum + value, 0) / values.length;
  const full = photographNamed(name, 64);
  for (const size of [16, 24, 32, 48]) {
    const { data, colours } = photographNamed(name, size);
    expect([data.length, colours!.length]).toEqual([size * size, 4 * size * size]);
    expect(mean(data)).toBeCloseTo(mean(full.data), 2);
    expect(data[5]! * 255).toBeCloseTo(colours![20]!, 6);
  }
});

describe("a link to the workbench", () => {
  test("restores taps, offsets and missing heads", () => {
    const taps = [0.5, -1.25, 0, 0, 2, 0, 0, 0, 1e-3];
    const change = { kernel: "free", taps, offsets: moved(BENCH, 8, [0.25, -1.5]), missing: [0, 3], query: [3, 4] };
    const state = reduce(START, { type: "bench", change });
    expect(fromHash(toHash(state))).toEqual(state);
  });

  test("with values out of range is clamped", () => {
    const { bench } = fromHash("#bench.alpha=1e9&bench.width=4&bench.stride=0&bench.head=99&bench.kernel=none&bench.taps=1,2&bench.missing=77&bench.size=9999");
    expect(bench).toEqual({ ...BENCH, alpha: 50, head: 8 });
  });
});

describe("formats", () => {
  test.each([
    [0, "0"], [1.23456, "1.23"], [-0.5, "−0.5"], [1.04e-16, "1.0 × 10⁻¹⁶"], [123456, "1.2 × 10⁵"], [0.0123, "0.0123"],
  ])("%d is written %s", (value, text) => {
    expect(shortNumber(value)).toBe(text);
  });

  test("percentages are never rounded to 0% or 100%", () => {
    expect([0.61, 0, 1, 0.99999, 1e-9].map(percent)).toEqual(["61%", "0%", "100%", "over 99.9%", "under 0.1%"]);
  });

  test("the strongest keys come first", () => {
    expect(strongest([0.1, 0.4, 0.2, 0.3], 2)).toEqual([{ index: 1, value: 0.4 }, { index: 3, value: 0.3 }]);
    expect(strongestKeys([0, 0.25, 0, 0.75], 2)).toBe("row 1, column 1 (75%); row 0, column 1 (25%)");
    expect(strongestKeys([0, 0], 2)).toBe("no key with 0.1% or more");
  });
});

test("a window at the corner of a plane is NaN outside the plane", () => {
  const plane = { height: 2, width: 3, data: Float64Array.from([1, 2, 3, 4, 5, 6]) };
  expect(Array.from(around(plane, [1, 2], 1).data)).toEqual([2, 3, NaN, 5, 6, NaN, NaN, NaN, NaN]);
});
