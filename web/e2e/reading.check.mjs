/** What the model explorer's maps, planes and words say about heads and images. */
import assert from "node:assert/strict";
import { shown } from "./explorer.mjs";
import { made } from "./payloads.mjs";

export const checks = {
  async "discs of uniform heads are hollow and those of heads with one place do not cover each other"(browser) {
    const { page, seen, close } = await shown(browser, made({ kind: "rows", layers: 1, heads: 4, side: 8 }));
    await page.locator(".plane .dot").nth(3).waitFor();
    const discs = await page.locator(".plane .dot").evaluateAll((found) =>
      found.map((dot) => ({ hollow: dot.classList.contains("hollow"), box: dot.getBoundingClientRect() })));
    assert.deepEqual(discs.map(({ hollow }) => hollow), [false, true, true, true]);
    const between = (one, other) => Math.hypot(one.box.x - other.box.x, one.box.y - other.box.y);
    for (const [one, other] of [[1, 2], [1, 3], [2, 3]]) assert.ok(between(discs[one], discs[other]) > 12, `${one} and ${other}`);
    await page.getByText("mean shifts, ±4 tokens dashed: wider than shown").waitFor();
    assert.deepEqual(seen, []);
    await close();
  },
};
