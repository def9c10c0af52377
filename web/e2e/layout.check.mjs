/** Layout at different window sizes, and of maps with one row. */
import assert from "node:assert/strict";
import { opened } from "./browser.mjs";
import { button, image, query, settled, shown } from "./explorer.mjs";
import { made } from "./payloads.mjs";

const UPRIGHT = { width: 820, height: 1180 };
const LYING = { width: 1180, height: 820 };
const WIDTHS = [320, 390, 690, 700, 820, 960];

/** List what is too wide: the page, and controls that extend beyond their fieldset. */
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

/** Return the height of a canvas on the page, and the fraction of its pixels that are painted. */
const painted = (canvas) =>
  canvas.evaluate((node) => {
    const { data } = node.getContext("2d").getImageData(0, 0, node.width, node.height);
    const opaque = data.filter((value, index) => index % 4 === 3 && value === 255).length;
    return { height: node.getBoundingClientRect().height, painted: (4 * opaque) / data.length };
  });

export const checks = {
  async "the display options are open on a wide page, and keep the visitor's choice on a narrow one when a tablet is rotated"(browser) {
    const { page, seen, close } = await shown(browser, made({ layers: 1, side: 8 }), { viewport: UPRIGHT });
    const softmax = page.getByRole("checkbox", { name: "softmax" });
    const summary = page.getByText("Display options");
    const turned = async (to) => {
      await page.setViewportSize(to);
      await settled(page);
      return [await summary.isVisible(), await softmax.isVisible()];
    };
    assert.deepEqual(await turned(UPRIGHT), [true, false]);
    assert.deepEqual(await turned(LYING), [false, true]);
    assert.deepEqual(await turned(UPRIGHT), [true, false], "closed again, since the visitor did not open it");
    await summary.click();
    assert.deepEqual(await turned(UPRIGHT), [true, true]);
    assert.deepEqual(await turned(LYING), [false, true]);
    assert.deepEqual(await turned(UPRIGHT), [true, true], "stays open after the visitor opened it");
    await summary.click();
    assert.deepEqual(await turned(LYING), [false, true]);
    assert.deepEqual(await turned(UPRIGHT), [true, false], "stays closed after the visitor closed it");
    assert.deepEqual(seen, []);
    await close();
  },

  async "between the widths of a phone and a tablet, nothing is wider than the page and no control is cut off"(browser) {
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
    await page.getByText("Display options").click();
    await page.getByRole("combobox", { name: /Scores in the softmax/ }).waitFor();
    await page.getByText("Column descriptions").first().click();
    await sweep("model", page);
    await close();
    assert.deepEqual(found, []);
  },

  async "maps, enlarged map and image of layers with one axis are at least 24 px high, and pointer and keys reach every token"(browser, shots) {
    for (const { tokens, kind, picture } of [
      { tokens: 400, kind: "positions", picture: [8, 400] },
      { tokens: 64, kind: "content", picture: [1, 64] },
    ]) {
      const bytes = made({ layers: 1, heads: 4, sizes: [1, tokens], kind, extent: 4, picture });
      const { page, seen, close } = await shown(browser, bytes, { hash: "&model.zoomed=true" });
      const zoomed = button(page, /^Map of head 0/);
      const stages = [page.locator(".map .stage").nth(2), zoomed, image(page)];
      for (const stage of stages) {
        const { height } = await stage.boundingBox();
        assert.ok(height >= 24 && height < 40, `${tokens} tokens: ${height} px`);
      }
      for (const canvas of await page.locator(".model canvas:not(.veil)").all()) {
        const shares = await painted(canvas);
        assert.ok(shares.height >= 24, `${tokens} tokens: a canvas of ${shares.height} px`);
        // The rest is transparent, behind the titles of small maps.
        assert.ok(shares.painted > 0.4, `${tokens} tokens: ${shares.painted} of the canvas are painted`);
      }
      for (const stage of [stages[0], stages[2]]) {
        for (const share of [0.1, 0.9]) {
          const { x, y, width, height } = await stage.boundingBox();
          for (const down of [1, height - 1]) {
            await page.mouse.move(x + share * width, y + down);
            const [row, column] = await query(page);
            assert.equal(row, 0);
            assert.ok(Math.abs(column - share * tokens) <= Math.ceil(tokens / width) + 1, `${column} of ${tokens} at ${share}`);
          }
        }
      }
      await zoomed.click({ position: { x: 5, y: 22 } });
      const key = async () => (await zoomed.getAttribute("aria-label")).match(/key at row (\d+), column (\d+)/).slice(1).map(Number);
      const [row, column] = await key();
      assert.deepEqual([row, column < 0.05 * tokens], [0, true]);
      await page.keyboard.press("ArrowRight");
      await page.keyboard.press("ArrowDown");
      assert.deepEqual(await key(), [0, column + 1]);
      await image(page).focus();
      const before = await query(page);
      for (const press of ["ArrowLeft", "ArrowUp", "Shift+ArrowLeft"]) await page.keyboard.press(press);
      assert.deepEqual(await query(page), [0, before[1] - 6]);
      assert.deepEqual(seen, []);
      const drawn = () => page.locator(".maps canvas").first().evaluate((canvas) => canvas.toDataURL());
      const far = await drawn();
      await page.getByRole("checkbox", { name: /1 × 15 tokens/ }).check();
      await stages[0].hover({ position: { x: 5, y: 5 } });
      assert.deepEqual(await query(page), [0, before[1] - 6], "the pointer does not move the query in a close-up");
      await settled(page);
      assert.notEqual(await drawn(), far);
      await page.screenshot({ path: `${shots}/model-one-axis-${tokens}.png` });
      await close();
    }
  },
};
