import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { ASKS, type Selection, TELLS, Teller, changeAsked, selectionOf } from "../src/state/channel";
import { openPayload } from "../src/core/payload";
import { MODEL, type ModelState } from "../src/state/model";
import { fixture } from "./readFixture";

const payload = openPayload(fixture("payload.safetensors"));
const { layers, images, times } = payload.manifest;
const asked = (entries: object): Partial<ModelState> | null => changeAsked(payload, { type: ASKS, ...entries });

describe("a message to the page", () => {
  test("selects a head, and a query on its layer's grid", () => {
    layers.forEach(({ heads, sizes }, layer) => {
      for (const query of [[0, 0], [sizes[0] - 1, sizes[1] - 1], [0, sizes[1] - 1]]) {
        const change = asked({ layer, head: heads - 1, query });
        expect(change).toMatchObject({ layer, head: heads - 1, zoomed: true, frozen: true, key: [] });
        const { query: told } = selectionOf(payload, { ...MODEL, ...change });
        if (layers[layer]!.kind !== "rows") expect(told).toEqual(query);
      }
    });
  });

  test("without a head enlarges none, without entries changes nothing, and with an image ends the mean", () => {
    expect(asked({ layer: 0, query: [1, 2] })).not.toHaveProperty("zoomed");
    expect(asked({})).toEqual({});
    expect(asked({ image: images.length - 1 })).toEqual({ image: images.length - 1, mean: false });
  });

  const { heads, sizes } = layers[0]!;
  const illegal: unknown[] = [
    null, undefined, 7, "attnconv-select", [], {}, { type: TELLS, layer: 0, head: 0 }, { layer: 0, head: 0 },
    ...[
      { layer: -1, head: 0 }, { layer: layers.length, head: 0 }, { layer: 0.5, head: 0 }, { layer: "0", head: 0 }, { layer: NaN, head: 0 },
      { head: 0 }, { query: [0, 0] }, { layer: 0, head: heads }, { layer: 0, head: null }, { layer: 0, head: [0] }, { layer: 0, head: 1n },
      { layer: 0, query: [0] }, { layer: 0, query: [0, 0, 0] }, { layer: 0, query: [sizes[0], 0] }, { layer: 0, query: [0, sizes[1]] },
      { layer: 0, query: [0, -1] }, { layer: 0, query: [0, 1e9] }, { layer: 0, query: "00" }, { layer: 0, query: { 0: 0, 1: 0, length: 2 } },
      { layer: 0, query: new Array(2) }, { layer: 0, query: ["0", "0"] }, { image: images.length }, { image: -1 }, { image: null },
      { layer: 0, head: 0, part: "both" }, { layer: 0, head: 0, more: 1 },
    ].map((entries) => ({ type: ASKS, ...entries })),
  ];
  test.each(illegal.map((data, index) => [index, data]))("is rejected if invalid: %i", (_, data) => {
    expect(changeAsked(payload, data)).toBeNull();
  });
});

describe("the selection", () => {
  test("is valid for the payload in every state", () => {
    const { layer, head, query, image, time, part } = selectionOf(payload, { ...MODEL, layer: 99, head: 99, query: [99, 99], image: 99 });
    const last = layers.at(-1)!;
    expect([layer, head, image, time]).toEqual([layers.length - 1, last.heads - 1, images.length - 1, times.length - 1]);
    expect(query[0]).toBeLessThan(last.sizes[0]);
    expect(query[1]).toBeLessThan(last.sizes[1]);
    expect(part).toBe("both");
  });

  test("has no image for the mean over images", () => {
    expect(images.length).toBeGreaterThan(1);
    expect(selectionOf(payload, { ...MODEL, mean: true }).image).toBeNull();
    const { layer, time } = selectionOf(payload, { ...MODEL, layer: 2, other: true, time: 0.75 });
    expect([layer, time], "no head of a second model, and also times between snapshots").toEqual([0, 0.75]);
  });

  test("has a query with a stored row", () => {
    const layer = layers.findIndex(({ kind }) => kind === "rows");
    const width = layers[layer]!.sizes[1];
    const [row, column] = selectionOf(payload, { ...MODEL, layer, query: [0, 1] }).query;
    expect(Array.from(payload.of(layer, "queries")!.data)).toContain(row * width + column);
  });
});

describe("messages of the page", () => {
  beforeEach(() => void vi.useFakeTimers());
  afterEach(() => void vi.useRealTimers());
  const at = (head: number): Selection => ({ layer: 0, head, query: [0, 0], image: 0, time: 0, part: "both" });

  test("are sent immediately, then at most ten times per second, and the last one always", () => {
    const heads: (number | undefined)[] = [];
    const teller = new Teller(({ selection }) => heads.push(selection?.head));
    for (let step = 0; step < 100; step++) {
      teller.tell(() => at(step));
      vi.advanceTimersByTime(10);
    }
    expect(heads[0]).toBe(0);
    expect(heads.length).toBeLessThanOrEqual(11);
    vi.advanceTimersByTime(200);
    expect(heads.at(-1)).toBe(99);
  });

  test("are repeated only on request", () => {
    const told: unknown[] = [];
    const teller = new Teller((message) => told.push(message));
    teller.tell(() => null);
    expect(told).toEqual([]);
    teller.tell(() => at(1));
    teller.tell(() => at(1));
    vi.advanceTimersByTime(500);
    expect(told).toEqual([{ type: TELLS, selection: at(1) }]);
    teller.answer();
    expect(told).toHaveLength(2);
    vi.advanceTimersByTime(500);
    teller.tell(() => null);
    expect(told).toHaveLength(3);
  });
});
