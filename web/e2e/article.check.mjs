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
    await page.getByText("These maps are a sketch").waitFor();
    await button(page, "Model explorer").click();
    await page.getByLabel(/Open a payload/).setInputFiles({ name: "waves.safetensors", mimeType: "", buffer: PAYLOAD });
    await button(page, "Article").click();
    await page.getByText("First 3 layers").waitFor();
    assert.equal(await page.getByText(/sketch/i).count(), 0);
    assert.deepEqual(await axeFindings(page), []);
    assert.deepEqual(seen, []);
    await page.screenshot({ path: `${shots}/article-payload.png`, fullPage: true });
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
