/** Sizes: of the window, while it is looked at and from a phone's to a notebook's, and of maps that have one row. */
import assert from "node:assert/strict";
import { opened } from "./browser.mjs";
import { button, image, query, settled, shown } from "./explorer.mjs";
import { made } from "./payloads.mjs";

const UPRIGHT = { width: 820, height: 1180 };
const LYING = { width: 1180, height: 820 };
const WIDTHS = [320, 390, 690, 700, 820, 960];

/** What is wider than it may be, in words: the page, and controls that reach out of their fieldset or label. */
const tooWide = (page) =>
  page.evaluate(() => {
    const over = document.documentElement.scrollWidth - innerWidth;
    const cut = [...document.querySelectorAll("select, input")].filter((control) => {
      const { left, right } = control.getBoundingClientRect();
      const around = (control.closest("fieldset") ?? control.closest("main")).getBoundingClientRect();
      return right > around.right || left < around.left;
    });
    return [...(over > 0 ? [`${over} px of the page`] : []), ...cut.map((control) => control.closest("label, fieldset").innerText.split("\n")[0])];
  });

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

  async "from a phone's to a tablet's width nothing is wider than the page, and no control is cut"(browser) {
    const found = [];
    const sweep = async (name, page) => {
      for (const width of WIDTHS) {
        await page.setViewportSize({ width, height: 900 });
        await settled(page);
        for (const words of await tooWide(page)) found.push(`${name}, ${width} px: ${words}`);
      }
    };
    for (const view of ["article", "bench", "model"]) {
      const { page, close } = await opened(browser, { hash: `#view=${view}` });
      await sweep(`${view} without a payload`, page);
      await close();
    }
    const bytes = made({ layers: 2, side: 16, times: 2, kind: "content", title: "a_title_without_a_gap".repeat(3) });
    const { page, close } = await shown(browser, bytes, { viewport: { width: 320, height: 900 }, hash: "&model.zoomed=true" });
    await page.getByText("What the maps show").click();
    await page.getByRole("combobox", { name: /Scores that the softmax sees/ }).waitFor();
    await page.getByText("What the columns say").first().click();
    await sweep("model", page);
    await close();
    assert.deepEqual(found, []);
  },
};
