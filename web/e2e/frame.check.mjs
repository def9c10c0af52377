/** The page's frame: tabs, description, link, print. */
import assert from "node:assert/strict";
import { opened } from "./browser.mjs";
import { shown } from "./explorer.mjs";
import { made } from "./payloads.mjs";

export const checks = {
  async "the article is the first tab, and the page has a title, a description and a preview"(browser) {
    const { page, close } = await opened(browser);
    assert.deepEqual(await page.locator("header nav button").allInnerTexts(), ["Article", "Model explorer", "Theorem workbench"]);
    assert.match(await page.title(), /^Self-attention can be a convolution/);
    for (const name of ["description", "og:title", "og:description"]) {
      const content = await page.locator(`meta[name="${name}"], meta[property="${name}"]`).getAttribute("content");
      assert.ok(content.length > 20, name);
    }
    await close();
  },

  async "a button copies a link that restores the view"(browser) {
    const { page, close } = await opened(browser, { hash: "#view=bench&bench.alpha=7", permissions: ["clipboard-read", "clipboard-write"] });
    await page.getByRole("button", { name: "Copy link" }).click();
    await page.getByRole("button", { name: "Link copied" }).waitFor();
    const link = await page.evaluate(() => navigator.clipboard.readText());
    assert.match(link, /index\.html#view=bench&bench\.alpha=7$/);
    await close();
  },

  async "printed pages are as wide as the window, in light colours, and cut no head"(browser) {
    const { page, close } = await shown(browser, made({ layers: 4, heads: 9, side: 8 }), { viewport: { width: 1440, height: 900 }, colorScheme: "dark" });
    const pdf = (await page.pdf({ preferCSSPageSize: true })).toString("latin1");
    const [, width] = pdf.match(/\/MediaBox \[0 0 ([\d.]+) [\d.]+\]/);
    assert.ok(Math.abs(Number(width) - 0.75 * 1520) < 2, width);
    await page.emulateMedia({ media: "print" });
    assert.equal(await page.evaluate(() => getComputedStyle(document.body).backgroundColor), "rgb(255, 255, 255)");
    for (const map of await page.locator(".map").all()) {
      const { x, width: wide } = await map.boundingBox();
      assert.ok(x + wide <= 1440);
    }
    assert.equal(await page.locator("header nav").isVisible(), false);
    const statistics = page.getByRole("region", { name: /^Head statistics/ }).getByRole("table");
    const cut = await statistics.evaluate((table) => table.parentElement.scrollHeight - table.parentElement.clientHeight);
    assert.ok(cut < 2, `${cut} px of the statistics are cut`);
    await close();
  },
};
