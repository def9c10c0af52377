import { describe, expect, test } from "vitest";
import { gaussianAt } from "../src/core/gaussians";
import { changedLogits, changesIn, changesText, relativeChange } from "../src/core/headChanges";
import { isRight, pictureWords } from "../src/core/pictures";
import { emptyMaps, fillMaps } from "../src/core/maps";
import { type Payload, openPayload } from "../src/core/payload";
import { headOrder } from "../src/core/statistics";
import { timeName } from "../src/core/times";
import { fixedPlane, livePlane, outlinePath, trailsOf } from "../src/draw/planes";
import { checkedModel, MODEL } from "../src/state/model";
import { fixture } from "./readFixture";

const payload = openPayload(fixture("payload.safetensors"));
const CHOICE = { part: "both", softmax: true, image: 0, mean: false, time: 0, prefix: -1 } as const;

describe("Gaussian heads between two snapshots", () => {
  const [before, after] = [0, 1].map((time) => gaussianAt(payload, 0, 1, time)!);

  test("have interpolated scores, up to a constant", () => {
    const between = gaussianAt(payload, 0, 1, 0.25)!;
    const score = ({ centre, precision }: typeof between, [row, column]: readonly [number, number]) => {
      const [a, b, c, d] = Array.from(precision);
      const [down, right] = [row - centre[0], column - centre[1]];
      return -0.5 * (a! * down ** 2 + (b! + c!) * down * right + d! * right ** 2);
    };
    const differences = ([[0, 0], [2, -1], [-3, 4], [1, 1]] as const).map((at) => 0.75 * score(before!, at) + 0.25 * score(after!, at) - score(between, at));
    expect(Math.max(...differences) - Math.min(...differences)).toBeLessThan(1e-5);
  });

  test("are those of the snapshots at their times", () => {
    expect(gaussianAt(payload, 0, 1, 1)).toEqual(after);
    expect(gaussianAt(payload, 1, 0, 0)).toBe(null);
  });
});

describe("the plane of a layer", () => {
  test("has the centres of Gaussian heads, and their trails", () => {
    const plane = fixedPlane(payload, 0, 1, trailsOf(payload, 0))!;
    expect(plane.map(({ centre }) => centre)).toEqual([0, 1].map((head) => gaussianAt(payload, 0, head, 1)!.centre));
    expect(plane[1]!.trail).toEqual([0, 1].map((time) => gaussianAt(payload, 0, 1, time)!.centre));
  });

  test("has the mean shift from the query of other heads", () => {
    expect(fixedPlane(payload, 1, 0, [])).toBe(null);
    const maps = emptyMaps(payload.manifest.layers[1]!);
    fillMaps(maps, payload, 1, 5, CHOICE);
    const { centre } = livePlane(maps, 4)[0]!;
    const mean = (along: (key: number) => number) => maps.heads[0]!.reduce((sum, share, key) => sum + share * along(key), 0);
    expect(centre![0]).toBeCloseTo(mean((key) => Math.floor(key / 4)) - 1, 12);
    expect(centre![1]).toBeCloseTo(mean((key) => key % 4) - 1, 12);
  });

  test("has outlines relative to the query's centre", () => {
    expect(outlinePath(Float64Array.of(1, 0, 0, 0), 2, 1, [0.5, 0.5])).toBe("M-0.5 -0.5L0.5 -0.5M-0.5 0.5L0.5 0.5M-0.5 -0.5L-0.5 0.5M0.5 -0.5L0.5 0.5");
  });
});

test("times between two epochs have a name", () => {
  const times = ["epoch 0", "epoch 4", "now"];
  expect([0, 1, 0.5, 1.5, 2].map((time) => timeName(times, time))).toEqual(["epoch 0", "epoch 4", "epoch 2.0", "epoch 4", "current weights"]);
});

test("a link may name a time between two snapshots", () => {
  expect([1.5, -0.5, 3].map((time) => checkedModel({ ...MODEL, time }).time)).toEqual([1.5, -1, 3]);
});

test("predictions are right, wrong or unknown", () => {
  const of = (label: string | null, logits = payload.logits): Payload => ({ ...payload, logits, manifest: { ...payload.manifest, images: [{ name: "one", label }] } });
  expect([of("crest"), of("steep"), of(null), of("steep", null)].map((some) => isRight(some, 0))).toEqual([false, true, null, null]);
  expect(pictureWords(of("crest"), 0)).toMatch(/^✗ Wrong. Label: crest. Predicted: steep 53.3%, crest 26.7%, trough 13.3%.$/);
  expect(pictureWords(of(null, null), 0)).toBe("");
});

test("logits with one changed head are those of the payload", () => {
  expect(changesIn("1.1.zero,0.9.zero,1.0.half,7.0.zero,,1.0.convolution", payload)).toEqual([
    { layer: 1, head: 1, to: "zero" },
    { layer: 1, head: 0, to: "convolution" },
  ]);
  expect(changesText(changesIn("1.1.zero,1.0.convolution", payload))).toBe("1.1.zero,1.0.convolution");
  const stored = payload.of(1, "zero_logits")!.data;
  expect(changedLogits(payload, 1, { layer: 1, head: 1, to: "zero" })).toEqual(stored.slice(12, 16));
  expect(changedLogits(payload, 1, { layer: 0, head: 1, to: "zero" })).toBe(null);
  expect(relativeChange([3, 4], [3, 9])).toBe(1);
});

test("heads are ordered by a statistic, and otherwise as in the model", () => {
  const layer = { ...payload.manifest.layers[0]!, heads: 3, statistics: { heads: { entropy: [1, 3, null], layer: [3, 1, 2] }, layer: {} } };
  expect(headOrder(layer, "entropy", true)).toEqual([1, 0, 2]);
  expect(headOrder(layer, "=layer", false)).toEqual([1, 2, 0]);
  for (const column of ["", "layer", "head", "unknown"]) expect(headOrder(layer, column, true)).toEqual([0, 1, 2]);
});
