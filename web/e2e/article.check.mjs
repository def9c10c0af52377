/** The article in the browser: every step by keyboard, accessibility, no requests, and its figures. */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { axeFindings, opened } from "./browser.mjs";

const STEPS = 10;
const PAYLOAD = readFileSync(new URL("../tests/fixtures/payload.safetensors", import.meta.url));
const at = (step) => ({ hash: `#view=article&article.step=${step}` });
const words = (page) => page.locator(".words").innerText();
const button = (page, name) => page.getByRole("button", { name });
const step = (page) => page.locator(".moves span").innerText();

/** Return the mean distance of a figure's colours from the middle of the signed scale. */
const strength = (figure) =>
  figure.locator("canvas").evaluate((canvas) => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return data.reduce((sum, value, at) => sum + (at % 4 === 3 ? 0 : Math.abs(value - 247)), 0) / data.length;
  });

/** Return the pixels of all figures. */
const drawn = (page) =>
  page.locator("figure canvas").evaluateAll((all) =>
    all.map((canvas) => [...canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data]),
  );

/** Return the share of visibly different values, in the figure that changed most. */
const changed = (before, after) =>
  Math.max(...after.map((values, figure) => values.filter((value, at) => Math.abs(value - before[figure][at]) > 20).length / values.length));

export const checks = {
  async "keyboard navigation through all steps: no errors, no requests, no axe findings"(browser) {
    for (const colorScheme of ["light", "dark"]) {
      const { page, seen, close } = await opened(browser, { ...at(1), colorScheme });
      const titles = new Set();
      const next = button(page, /^Next/);
      await next.focus();
      for (let number = 1; number <= STEPS; number++) {
        assert.equal(await step(page), `${number} of ${STEPS}`);
        titles.add(await page.getByRole("heading", { level: 2 }).innerText());
        assert.deepEqual(await axeFindings(page), [], `step ${number}, ${colorScheme}`);
        await page.keyboard.press("Enter");
      }
      assert.equal(titles.size, STEPS);
      await page.keyboard.press("Shift+Tab");
      await page.keyboard.press("Enter");
      assert.equal(await step(page), `${STEPS - 1} of ${STEPS}`);
      assert.deepEqual(seen, []);
      await close();
    }
  },

  async "arrow keys move the query or the centre, and the live text follows"(browser) {
    for (let number = 1; number <= STEPS; number++) {
      const { page, seen, close } = await opened(browser, at(number));
      const stage = page.locator("button.stage").first();
      await stage.focus();
      const before = await words(page);
      for (const key of ["ArrowDown", "ArrowRight"]) await page.keyboard.press(key);
      assert.notEqual(await words(page), before, `step ${number}`);
      await page.waitForFunction(() => {
        const said = [...document.querySelectorAll("[aria-live]")].map((live) => live.textContent);
        return said.includes(document.querySelector(".words").textContent);
      });
      assert.deepEqual(seen, []);
      await close();
    }
  },

  async "pointer and touch move the query; targets are at least 24 px and the page does not scroll sideways"(browser) {
    const { page, close } = await opened(browser, { ...at(1), viewport: { width: 390, height: 800 }, hasTouch: true, isMobile: true });
    for (let number = 0; number < STEPS; number++) {
      const stage = page.locator("button.stage").first();
      await stage.scrollIntoViewIfNeeded();
      const box = await stage.boundingBox();
      const before = await stage.getAttribute("aria-label");
      await page.touchscreen.tap(box.x + box.width * 0.3, box.y + box.height * 0.62);
      assert.notEqual(await stage.getAttribute("aria-label"), before);
      const small = await page.evaluate(() =>
        [...document.querySelectorAll("button, select, input")]
          .map((target) => ({ box: target.getBoundingClientRect(), words: target.outerHTML.slice(0, 120) }))
          .filter(({ box }) => box.width < 24 || box.height < 24)
          .map(({ box, words }) => `${box.width} x ${box.height}: ${words}`),
      );
      assert.deepEqual(small, []);
      assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), `step ${await step(page)} scrolls sideways`);
      if (number + 1 < STEPS) await button(page, /^Next/).tap();
    }
    await close();
  },

  async "the figures show what the steps describe"(browser) {
    const { page, seen, close } = await opened(browser, at(1));
    const go = (number) => page.getByRole("navigation", { name: "Steps of the article" }).getByRole("button").nth(number - 1).click();
    for (let shift = 3; shift < 9; shift++) await button(page, "Add the next shift").click();
    assert.match(await words(page), /^Shift 9 of 9/);
    await go(3);
    assert.match(await words(page), /are identical/);
    await page.getByRole("checkbox", { name: /positions/ }).check();
    assert.match(await words(page), /differ by up to 0\.\d/);
    await go(4);
    for (const box of await page.getByRole("checkbox").all()) await box.uncheck();
    assert.match(await words(page), /^No terms/);
    await go(6);
    await page.getByRole("slider", { name: /Sharpness/ }).focus();
    await page.keyboard.press("End");
    assert.match(await page.getByTestId("off").innerText(), /10⁻/);
    await go(7);
    await button(page, /^Hard/).click();
    assert.match(await page.getByTestId("error").innerText(), /^0$|10⁻¹/);
    await go(8);
    assert.match(await words(page), /not at the border/);
    await page.getByRole("combobox", { name: /Padding/ }).selectOption("zero");
    assert.match(await words(page), /layer is equivalent to the convolution\.$/);
    await button(page, "One head missing").click();
    assert.match(await words(page), /is not equivalent to the convolution/);
    await go(10);
    await page.getByRole("slider", { name: /content/ }).focus();
    await page.keyboard.press("Home");
    assert.match(await words(page), /The head is a convolution/);
    assert.deepEqual(seen, []);
    await close();
  },

  async "the theorem's step opens in the workbench with its settings, and a link restores a step"(browser) {
    const { page, close } = await opened(browser, at(7));
    await button(page, /^Soft/).click();
    const error = await page.getByTestId("error").innerText();
    await page.waitForFunction(() => location.hash.includes("article.offsets"));
    const hash = new URL(page.url()).hash;
    const href = await page.getByRole("link", { name: /workbench/ }).getAttribute("href");
    await page.getByRole("link", { name: /workbench/ }).click();
    assert.match(await page.getByRole("heading", { level: 2 }).innerText(), /workbench/);
    assert.equal(await page.getByTestId("error").innerText(), error);
    await close();
    for (const link of [hash, href]) {
      const again = await opened(browser, { hash: link });
      assert.equal(await again.page.getByTestId("error").innerText(), error);
      await again.close();
    }
  },

  async "the browser's back button returns to the previous step"(browser) {
    const { page, close } = await opened(browser, at(1));
    await button(page, /^Next/).click();
    await page.waitForFunction(() => location.hash.includes("step=2"));
    await button(page, /^Next/).click();
    await page.waitForFunction(() => location.hash.includes("step=3"));
    await page.goBack();
    await page.getByText(`2 of ${STEPS}`).waitFor();
    await close();
  },

  async "the figure of trained heads shows the payload, or a sketch that is marked as one"(browser, shots) {
    const { page, seen, close } = await opened(browser, at(9));
    await page.getByText("These heads are a sketch").waitFor();
    await page.getByRole("button", { name: "Model explorer", exact: true }).click();
    await page.getByLabel(/Open a payload/).setInputFiles({ name: "waves.safetensors", mimeType: "", buffer: PAYLOAD });
    await button(page, "Article").click();
    await page.getByText("first 3 of").waitFor();
    assert.equal(await page.getByText(/sketch/i).count(), 0);
    assert.deepEqual(await axeFindings(page), []);
    assert.deepEqual(seen, []);
    await page.screenshot({ path: `${shots}/article-payload.png`, fullPage: true });
    await close();
  },

  async "step 7 shows attention, convolution and difference without scrolling, and the difference fades on a fixed scale"(browser) {
    for (const [width, height] of [[1440, 900], [1024, 768]]) {
      const { page, close } = await opened(browser, { ...at(7), viewport: { width, height } });
      const bar = await page.locator(".moves").boundingBox();
      for (const part of await page.locator(".payoff > figure").all()) {
        const box = await part.boundingBox();
        assert.ok(box.y + box.height <= bar.y, `${width}: ends at ${box.y + box.height}, the bar begins at ${bar.y}`);
      }
      const difference = page.locator(".payoff > figure").nth(2);
      const scale = await difference.locator(".ends").innerText();
      const before = await strength(difference);
      await button(page, /^Hard/).click();
      assert.equal(await difference.locator(".ends").innerText(), scale);
      assert.ok(before > 3 && (await strength(difference)) < 1, String(before));
      await close();
    }
  },

  async "positions in step 3 change something visible"(browser) {
    const { page, close } = await opened(browser, at(3));
    const before = await drawn(page);
    await page.getByRole("checkbox", { name: /positions/ }).check();
    assert.ok(changed(before, await drawn(page)) > 0.2);
    const difference = page.locator("figure").filter({ hasText: "in the original order" });
    assert.ok((await strength(difference)) > 3, String(await strength(difference)));
    await page.getByRole("checkbox", { name: /positions/ }).uncheck();
    assert.ok((await strength(difference)) < 1);
    await close();
  },

  async "the strongest content of step 10 changes something visible"(browser) {
    const { page, close } = await opened(browser, at(10));
    const before = await drawn(page);
    await page.getByRole("slider", { name: /content/ }).focus();
    await page.keyboard.press("End");
    assert.ok(changed(before, await drawn(page)) > 0.05);
    await close();
  },

  async "step 9 opens with its query in the middle of a picture in colour"(browser) {
    const { page, close } = await opened(browser, at(9));
    const query = async () => (await page.locator("button.stage").first().getAttribute("aria-label")).match(/row (\d+), column (\d+)/).slice(1).map(Number);
    const coloured = () =>
      page.locator("button.stage canvas").first().evaluate((canvas) => {
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return data.some((value, at) => at % 4 === 0 && Math.abs(value - data[at + 2]) > 20);
      });
    assert.deepEqual(await query(), [8, 8]);
    assert.ok(await coloured());
    await page.getByRole("button", { name: "Model explorer", exact: true }).click();
    await page.getByLabel(/Open a payload/).setInputFiles({ name: "waves.safetensors", mimeType: "", buffer: PAYLOAD });
    await button(page, "Article").click();
    await page.getByText("first 3 of").waitFor();
    assert.deepEqual(await query(), [1, 2], "the middle of 3 x 4 tokens");
    assert.ok(await coloured());
    await close();
  },

  async "short steps fit the window, without a scroll bar"(browser) {
    const { page, close } = await opened(browser, { ...at(1), viewport: { width: 1440, height: 900 } });
    assert.ok((await page.evaluate(() => document.documentElement.scrollHeight)) <= 900);
    await close();
  },

  async "step 5 names both column shifts that have the highest score"(browser) {
    const { page, close } = await opened(browser, { hash: "#view=article&article.step=5&article.centre=0,1.5" });
    await page.getByText("Column shifts 1 and 2 have the highest score").first().waitFor();
    await close();
  },

  async "numbers have at most four significant digits"(browser) {
    for (let number = 1; number <= STEPS; number++) {
      const { page, close } = await opened(browser, at(number));
      const stage = page.locator("button.stage").first();
      await stage.focus();
      for (const key of ["ArrowDown", "ArrowRight", "ArrowRight"]) await page.keyboard.press(key);
      const text = await page.locator(".figure").innerText();
      const long = (text.match(/\d+(?:\.\d+)?/g) ?? []).filter((found) => found.replace(".", "").replace(/^0+/, "").length > 4);
      assert.deepEqual(long, [], `step ${number}`);
      await close();
    }
  },

  async "equations have the embedded font, parentheses are no higher than their content, and subscripts are below the line"(browser) {
    const found = { signs: 0, subscripts: 0 };
    for (let number = 1; number <= STEPS; number++) {
      const { page, close } = await opened(browser, at(number));
      const equations = await page.locator(".equation math").count();
      await page.evaluate(() => document.fonts.ready);
      const { loaded, signs, subscripts } = await page.evaluate(() => ({
        loaded: [...document.fonts].some(({ family, status }) => family === "Equations" && status === "loaded"),
        signs: [...document.querySelectorAll("math mo")]
          .filter((node) => /^[(){}‖]$/.test(node.textContent))
          .map((node) => node.getBoundingClientRect().height / parseFloat(getComputedStyle(node).fontSize)),
        subscripts: [...document.querySelectorAll("math msub, math msubsup")].map(({ children: [base, below] }) =>
          below.getBoundingClientRect().bottom - base.getBoundingClientRect().bottom,
        ),
      }));
      if (equations > 0) assert.ok(loaded, `step ${number}: the font is not loaded`);
      for (const height of signs) assert.ok(height < 1.4, `step ${number}: a parenthesis of ${height} times the font's size`);
      for (const depth of subscripts) assert.ok(depth > 2, `step ${number}: a subscript ${depth} px below its letter`);
      found.signs += signs.length;
      found.subscripts += subscripts.length;
      await close();
    }
    assert.ok(found.signs > 20 && found.subscripts > 40, JSON.stringify(found));
  },

  async "a term of the formula and its picture are highlighted together"(browser) {
    const { page, close } = await opened(browser, { ...at(4), viewport: { width: 1440, height: 900 } });
    const outlined = () => page.locator(".pictures.four > figure").evaluateAll((all) => all.map((one) => getComputedStyle(one).outlineStyle === "solid"));
    await page.locator(".term-2").hover();
    assert.deepEqual(await outlined(), [false, false, true, false]);
    await page.locator(".pictures.four > figure").nth(1).hover();
    const back = await page.locator(".term-1").evaluate((node) => getComputedStyle(node).backgroundColor);
    assert.notEqual(back, "rgba(0, 0, 0, 0)");
    await close();
  },

  async "screenshots of every step at the widths of a phone, a laptop and a projector"(browser, shots) {
    for (const [name, width, colorScheme] of [["phone", 390, "light"], ["projector", 1920, "light"], ["laptop", 1280, "dark"]]) {
      const { page, close } = await opened(browser, { ...at(1), viewport: { width, height: 1000 }, colorScheme, reducedMotion: "reduce" });
      for (let number = 1; number <= STEPS; number++) {
        await page.screenshot({ path: `${shots}/article-${name}-${String(number).padStart(2, "0")}.png`, fullPage: true });
        if (number < STEPS) await button(page, /^Next/).click();
      }
      await close();
    }
  },
};
