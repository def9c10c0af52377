/** What the model explorer's maps, planes and words say about heads and images. */
import assert from "node:assert/strict";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { PAGE } from "./browser.mjs";
import { button, image, query, shown } from "./explorer.mjs";
import { made } from "./payloads.mjs";

/** Write a page with a list of models, as `attnconv.explorer.export` does, and return its folder. */
function site(models) {
  const folder = mkdtempSync(join(tmpdir(), "attnconv-models-"));
  mkdirSync(join(folder, "models"));
  const listed = Object.entries(models).map(([name, { about }]) => ({ title: name.replace(/^./, (first) => first.toUpperCase()), file: `models/${name}.js`, about }));
  const list = `<script type="application/json" id="attnconv-models">${JSON.stringify(listed)}</script></body>`;
  writeFileSync(join(folder, "index.html"), readFileSync(PAGE, "utf8").replace(/<\/body>(?![\s\S]*<\/body>)/, () => list));
  for (const [name, { bytes }] of Object.entries(models)) {
    writeFileSync(join(folder, "models", `${name}.js`), `attnconvModel("${name}", "${bytes.toString("base64")}");`);
  }
  return folder;
}

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

  async "predictions name the weights they belong to, and the mean over images has none"(browser) {
    const bytes = made({ layers: 1, heads: 3, side: 8, images: 2, known: true, times: 3 });
    const { page, seen, close } = await shown(browser, bytes, { hash: "&model.time=1&model.zoomed=true&model.changed=0.0.zero" });
    await page.getByText("With the final weights: ✓ Right. Label: frog.").waitFor();
    await button(page, "Next snapshot").click();
    await page.getByText("With the final weights").waitFor({ state: "detached" });
    await button(page, "mean over all 2").click();
    await page.locator(".zoom [role=status]").getByText("head 0 switched off: select one image").waitFor();
    assert.equal(await page.locator("main").getByText(/Predicted:/).count(), 0);
    assert.deepEqual(seen, []);
    await close();
  },

  async "a changed head is marked on its map and under the image, also after a reload, and can be undone there"(browser) {
    const bytes = made({ layers: 2, heads: 3, side: 8, images: 2, known: true });
    for (const undone of [/^off · undo ?, layer 1, head 2$/, /^Undo$/]) {
      const { page, seen, close } = await shown(browser, bytes, { hash: "&model.changed=1.2.zero" });
      await page.locator("figcaption").getByText("layer 1, head 2 switched off. Then predicted: cat 50%").waitFor();
      await button(page, undone).click();
      await button(page, undone).waitFor({ state: "detached" });
      await page.waitForFunction(() => !location.hash.includes("changed"));
      assert.equal(await page.locator(".changed").count(), 0);
      await button(page, /^layer 0, head 1: enlarge$/).click();
      await button(page, "nearest convolution").click();
      await page.locator(".zoom").getByText("Map and formula show the attention as trained.").waitFor();
      assert.deepEqual(seen, []);
      await close();
    }
  },

  async "the veil over the image is clear where a head attends most, and there is none for a uniform head"(browser) {
    const { page, seen, close } = await shown(browser, made({ kind: "rows", layers: 1, heads: 3, side: 8 }));
    await page.locator(".map .stage").nth(0).hover();
    await page.getByText("layer 0, head 0: bright where it attends").waitFor();
    const opacity = await page.locator("canvas.veil").evaluate((veil) => {
      const { data } = veil.getContext("2d").getImageData(0, 0, 8, 8);
      return [data[3], data[4 * 9 + 3]];
    });
    assert.equal(opacity[0], 0);
    assert.ok(opacity[1] > 150);
    await page.locator(".map .stage").nth(1).hover();
    await page.getByText("layer 0, head 1: attends almost uniformly").waitFor();
    assert.equal(await page.locator("canvas.veil").count(), 0);
    assert.deepEqual(seen, []);
    await close();
  },

  async "a key under the pointer is shown in image, enlarged map and formula, and its value in a close-up"(browser) {
    const { page, seen, close } = await shown(browser, made({ layers: 2, heads: 3, side: 16 }), { viewport: { width: 1280, height: 1400 }, hash: "&model.zoomed=true&model.frozen=true&model.query=8,8" });
    const picture = await image(page).boundingBox();
    const shift = page.locator(".zoom dd").first();
    const strongest = await shift.innerText();
    await page.mouse.move(picture.x + (3.5 / 16) * picture.width, picture.y + (5.5 / 16) * picture.height);
    await page.locator(".readout").getByText(/^layer 0, head 0 · row 5, column 3 · probability/).waitFor();
    assert.match(await shift.innerText(), /^\(5, 3\) − \(8, 8\)/);
    assert.deepEqual(await query(page), [8, 8]);
    const mark = page.locator("rect.key");
    assert.deepEqual([await mark.getAttribute("x"), await mark.getAttribute("y")], ["3", "5"]);
    const stage = page.locator(".zoom .stage");
    const box = await stage.boundingBox();
    await page.mouse.move(box.x + (12.5 / 16) * box.width, box.y + (1.5 / 16) * box.height);
    await page.locator(".zoom").getByText(/^Row 1, column 12: probability/).waitFor();
    assert.match(await shift.innerText(), /^\(1, 12\) − \(8, 8\)/);
    assert.deepEqual([await mark.getAttribute("x"), await mark.getAttribute("y")], ["12", "1"]);
    await page.mouse.move(0, 0);
    await mark.waitFor({ state: "detached" });
    assert.equal(await shift.innerText(), strongest);
    await page.getByRole("checkbox", { name: "close-up of 15 × 15 tokens" }).check();
    const map = await page.locator(".map .stage").nth(4).boundingBox();
    await page.mouse.move(map.x + map.width / 2, map.y + map.height / 2);
    await page.locator(".readout").getByText(/^layer 1, head 1 · row 8, column 8 · probability/).waitFor();
    assert.deepEqual(seen, []);
    await close();
  },

  async "without softmax, uniform heads are dark and numbers are relative to uniform attention"(browser) {
    const bytes = made({ layers: 1, heads: 3, side: 8 });
    const pixels = (page) => page.locator(".maps canvas").evaluate((canvas) => canvas.toDataURL());
    const { page, seen, close } = await shown(browser, bytes, { hash: "&model.query=4,4" });
    const probability = Number((await page.locator(".map .soft").first().innerText()).replace(/max |%/g, "")) / 100;
    const before = await pixels(page);
    await page.getByRole("checkbox", { name: "softmax" }).uncheck();
    await page.getByText("score (0 = uniform)").waitFor();
    await page.waitForFunction(() => !document.querySelector(".map .soft").textContent.includes("%"));
    const score = Number((await page.locator(".map .soft").first().innerText()).replace("max ", ""));
    assert.ok(Math.abs(score - Math.log(64 * probability)) < 0.1, `${score}, ${probability}`);
    assert.equal(await pixels(page), before, "the same colours");
    assert.deepEqual(await page.locator("figure .marks span").allInnerTexts(), ["0", "1.4", "2.8", "4.2"]);
    assert.deepEqual(seen, []);
    await close();
  },

  async "models have descriptions, comparisons show the same image, and Back returns to the previous model"(browser) {
    const folder = site({
      first: { about: "Trained on waves", bytes: made({ layers: 1, heads: 3, side: 8, images: 3, title: "First" }) },
      second: { about: "Trained on more waves", bytes: made({ layers: 1, heads: 3, side: 8, images: 2, title: "Second" }) },
    });
    const context = await browser.newContext();
    const page = await context.newPage();
    const title = (words) => page.locator("header").getByText(words, { exact: true }).waitFor();
    await page.goto(`${pathToFileURL(folder).href}/index.html#view=model&model.own=models/first.js&model.image=2`);
    await title("First");
    await page.getByText("Trained on more waves").waitFor();
    await page.getByRole("button", { name: "Second", exact: true }).click();
    await title("Second");
    await page.waitForFunction(() => /own=models.*second\.js/.test(location.hash)); // the URL is written after a pause
    await page.getByText("This model does not have the selected image, so waves 1 is shown instead.").waitFor();
    await page.getByRole("combobox", { name: /^Compare with/ }).selectOption("First");
    await button(page, /^A, Second: waves 1, query/).waitFor();
    await button(page, /^B, First: waves 1, query/).waitFor();
    await page.getByRole("heading", { name: "Head statistics of A, Second" }).waitFor();
    await page.waitForFunction(() => location.hash.includes("second=models/first.js") || location.hash.includes("second=models%2Ffirst.js"));
    await page.goBack();
    await button(page, /^B, First/).waitFor({ state: "detached" });
    await title("Second");
    await page.goBack();
    await title("First");
    await page.getByRole("combobox", { name: /^Compare with/ }).selectOption("Second");
    await page.getByText("Not A's image, which this model does not have.").waitFor();
    await page.getByRole("button", { name: "Second", exact: true }).click();
    await title("Second");
    await button(page, /^B, Second/).waitFor({ state: "detached" });
    assert.equal(await page.getByRole("combobox", { name: /^Compare with/ }).inputValue(), "", "no model is compared with itself");
    await page.emulateMedia({ media: "print" });
    assert.equal(await page.getByRole("group", { name: "Models" }).isVisible(), false, "controls are not printed");
    await context.close();
    rmSync(folder, { recursive: true });
  },

  async "enlarging from the table shows the heading below the legend"(browser) {
    const { page, close } = await shown(browser, made({ layers: 4, heads: 3, side: 8 }), { reducedMotion: "reduce" });
    await button(page, "layer 2, head 1: enlarge from the table").click();
    await page.getByRole("heading", { name: /^layer 2, head 1/ }).waitFor();
    const [legend, zoom] = [await page.locator(".legend").boundingBox(), await page.locator(".zoom").boundingBox()];
    assert.ok(zoom.y >= legend.y + legend.height && zoom.y < 120, `${zoom.y}`);
    await close();
  },

  async "on a phone, maps come before thumbnails and controls"(browser) {
    const bytes = made({ layers: 1, heads: 3, side: 8, images: 3, times: 3 });
    const { page, close } = await shown(browser, bytes, { viewport: { width: 390, height: 844 } });
    const top = async (locator) => (await locator.boundingBox()).y;
    const maps = await top(page.locator(".strip").first());
    assert.ok(maps < 900, `${maps} px`);
    for (const after of [page.locator(".tiles"), page.getByText("Training", { exact: true }), page.getByText("Display options")]) assert.ok((await top(after)) > maps);
    assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), "scrolls sideways");
    await close();
  },
};
