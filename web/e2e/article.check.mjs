/** The article in the browser: every step by keyboard, with axe, without a request; its figures at work. */
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
  async "a walk by keyboard through all steps: no error, no request, axe finds nothing"(browser) {
    for (const colorScheme of ["light", "dark"]) {
      const { page, seen, close } = await opened(browser, { hash: "#view=article", colorScheme });
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

  async "arrow keys move the query or the centre, and what is said follows"(browser) {
    for (let number = 0; number < STEPS; number++) {
      const { page, seen, close } = await opened(browser, at(number));
      const stage = page.locator("button.stage").first();
      await stage.focus();
      const before = await words(page);
      for (const key of ["ArrowDown", "ArrowRight"]) await page.keyboard.press(key);
      assert.notEqual(await words(page), before, `step ${number + 1}`);
      await page.waitForFunction(() => {
        const said = [...document.querySelectorAll("[aria-live]")].map((live) => live.textContent);
        return said.includes(document.querySelector(".words").textContent);
      });
      assert.deepEqual(seen, []);
      await close();
    }
  },

  async "pointer and touch move the query; targets are 24 px or larger and nothing scrolls sideways"(browser) {
    const { page, close } = await opened(browser, { ...at(0), viewport: { width: 390, height: 800 }, hasTouch: true, isMobile: true });
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

  async "figures do what their steps say"(browser) {
    const { page, seen, close } = await opened(browser, { hash: "#view=article" });
    const go = (number) => page.getByRole("navigation", { name: "Steps of the article" }).getByRole("button").nth(number - 1).click();
    for (let shift = 3; shift < 9; shift++) await button(page, "Add the next shift").click();
    assert.match(await words(page), /^Shift 9 of 9/);
    await go(3);
    assert.match(await words(page), /difference is zero|nothing at all/);
    await page.getByRole("checkbox", { name: /positions/ }).check();
    assert.match(await words(page), /differ by up to 0\.\d/);
    await go(4);
    for (const box of await page.getByRole("checkbox").all()) await box.uncheck();
    assert.match(await words(page), /^No term/);
    await go(6);
    await page.getByRole("slider", { name: /Sharpness/ }).focus();
    await page.keyboard.press("End");
    assert.match(await page.getByTestId("off").innerText(), /10⁻/);
    await go(7);
    await button(page, "Hard").click();
    assert.match(await page.getByTestId("error").innerText(), /^0$|10⁻¹/);
    await go(8);
    assert.match(await words(page), /at the border another one/);
    await page.getByRole("combobox", { name: /outside/ }).selectOption("zero");
    assert.match(await words(page), /Both are rounding/);
    await button(page, "One head missing").click();
    assert.match(await words(page), /not this convolution anywhere/);
    await go(10);
    await page.getByRole("slider", { name: /content/ }).focus();
    await page.keyboard.press("Home");
    assert.match(await words(page), /The head is a convolution/);
    assert.deepEqual(seen, []);
    await close();
  },

  async "the theorem's step opens in the bench as it stands, and a link restores a step"(browser) {
    const { page, close } = await opened(browser, at(6));
    await button(page, "As trained").click();
    const error = await page.getByTestId("error").innerText();
    await page.waitForFunction(() => location.hash.includes("article.offsets"));
    const hash = new URL(page.url()).hash;
    const href = await page.getByRole("link", { name: "Open this in the bench" }).getAttribute("href");
    await page.getByRole("link", { name: "Open this in the bench" }).click();
    assert.match(await page.getByRole("heading", { level: 2 }).innerText(), /bench/);
    assert.equal(await page.getByTestId("error").innerText(), error);
    await close();
    for (const link of [hash, href]) {
      const again = await opened(browser, { hash: link });
      assert.equal(await again.page.getByTestId("error").innerText(), error);
      await again.close();
    }
  },

  async "back in the browser goes a step back"(browser) {
    const { page, close } = await opened(browser, { hash: "#view=article" });
    await button(page, /^Next/).click();
    await page.waitForFunction(() => location.hash.includes("step=1"));
    await button(page, /^Next/).click();
    await page.waitForFunction(() => location.hash.includes("step=2"));
    await page.goBack();
    await page.getByText(`2 of ${STEPS}`).waitFor();
    await close();
  },

  async "with a payload its heads are live, without one a sketch says so"(browser, shots) {
    const { page, seen, close } = await opened(browser, at(8));
    await page.getByText("A sketch, drawn by formula").waitFor();
    await button(page, "Model explorer").click();
    await page.getByLabel(/Open a payload/).setInputFiles({ name: "waves.safetensors", mimeType: "", buffer: PAYLOAD });
    await button(page, "Article").click();
    await page.getByText("its first 3 layers").waitFor();
    assert.equal(await page.getByText("A sketch").count(), 0);
    assert.deepEqual(await axeFindings(page), []);
    assert.deepEqual(seen, []);
    await page.screenshot({ path: `${shots}/article-payload.png`, fullPage: true });
    await close();
  },

  async "screenshots of every step at a phone's and a projector's width"(browser, shots) {
    for (const [name, width, colorScheme] of [["phone", 390, "light"], ["projector", 1920, "light"], ["laptop", 1280, "dark"]]) {
      const { page, close } = await opened(browser, { ...at(0), viewport: { width, height: 1000 }, colorScheme, reducedMotion: "reduce" });
      for (let number = 1; number <= STEPS; number++) {
        await page.screenshot({ path: `${shots}/article-${name}-${String(number).padStart(2, "0")}.png`, fullPage: true });
        if (number < STEPS) await button(page, /^Next/).click();
      }
      await close();
    }
  },
};
