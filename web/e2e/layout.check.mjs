/** Sizes: of the window, while it is looked at and from a phone's to a notebook's, and of maps that have one row. */
import assert from "node:assert/strict";
import { opened } from "./browser.mjs";
import { button, image, query, settled, shown } from "./explorer.mjs";
import { made } from "./payloads.mjs";

const UPRIGHT = { width: 820, height: 1180 };
const LYING = { width: 1180, height: 820 };

export const checks = {
  async "a tablet that is turned keeps what the maps show: open where it is wide, as the visitor left it where it is not"(browser) {
    const { page, seen, close } = await shown(browser, made({ layers: 1, side: 8 }), { viewport: UPRIGHT });
    const softmax = page.getByRole("checkbox", { name: "softmax" });
    const summary = page.getByText("What the maps show");
    const turned = async (to) => {
      await page.setViewportSize(to);
      await settled(page);
      return [await summary.isVisible(), await softmax.isVisible()];
    };
    assert.deepEqual(await turned(UPRIGHT), [true, false]);
    assert.deepEqual(await turned(LYING), [false, true]);
    assert.deepEqual(await turned(UPRIGHT), [true, false], "what nobody opened is closed again");
    await summary.click();
    assert.deepEqual(await turned(UPRIGHT), [true, true]);
    assert.deepEqual(await turned(LYING), [false, true]);
    assert.deepEqual(await turned(UPRIGHT), [true, true], "what the visitor opened stays open");
    await summary.click();
    assert.deepEqual(await turned(LYING), [false, true]);
    assert.deepEqual(await turned(UPRIGHT), [true, false], "what the visitor closed stays closed");
    assert.deepEqual(seen, []);
    await close();
  },
};
