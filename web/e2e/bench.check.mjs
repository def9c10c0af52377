/** The theorem workbench in the browser. */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { axeFindings, opened } from "./browser.mjs";

const FIXTURES = new URL("../tests/fixtures/", import.meta.url);
const fixtures = JSON.parse(readFileSync(new URL("theorem.json", FIXTURES), "utf8"));
const MINUS = /−/g;
const RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹";

/** Parse a number in the page's format. */
function parsed(text) {
  const [mantissa, power] = text.replace(MINUS, "-").split(" × 10");
  if (power === undefined) return Number(mantissa);
  return Number(`${mantissa}e${power.replace("⁻", "-").replace(/[⁰¹²³⁴⁵⁶⁷⁸⁹]/g, (digit) => RAISED.indexOf(digit))}`);
}

const shown = async (page, id) => parsed(await page.getByTestId(id).innerText());
const atBench = (browser, options = {}) => opened(browser, { hash: "#view=bench", ...options });
const button = (page, name) => page.getByRole("button", { name });

export const checks = {
  async "opens from disk without errors, requests or axe findings"(browser) {
    for (const colorScheme of ["light", "dark"]) {
      const { page, seen, close } = await atBench(browser, { colorScheme });
      assert.deepEqual(await axeFindings(page), []);
      assert.deepEqual(seen, []);
      await close();
    }
  },

  async "hard heads equal the convolution, soft and missing heads do not, and the bound holds"(browser) {
    const { page, close } = await atBench(browser);
    await button(page, /^Hard/).click();
    assert.ok((await shown(page, "error")) < 1e-14);
    for (const name of [/^Soft heads/, /^One head missing/]) {
      await button(page, name).click();
      assert.ok((await shown(page, "error")) > 0.01);
      assert.ok((await shown(page, "error")) <= (await shown(page, "bound")));
    }
    await close();
  },

  async "the browser's numbers equal the library's"(browser) {
    const { page, close } = await atBench(browser);
    for (const entry of fixtures.cases) {
      const apart = await page.evaluate((given) => globalThis.attnconv.apart(given), entry);
      assert.ok(Math.max(...Object.values(apart)) < 1e-6, JSON.stringify([entry.geometry, apart]));
    }
    const bytes = [...readFileSync(new URL("payload.safetensors", FIXTURES))];
    for (const row of JSON.parse(readFileSync(new URL("payload.json", FIXTURES), "utf8")).rows) {
      const apart = await page.evaluate(([all, one]) => globalThis.attnconv.rowApart(all, one), [bytes, row]);
      assert.ok(apart < 1e-6, JSON.stringify([row.place, row.part, apart]));
    }
    await close();
  },

  async "can be operated by keyboard only"(browser) {
    const { page, seen, close } = await atBench(browser);
    const reached = new Set();
    for (let press = 0; press < 80; press++) {
      await page.keyboard.press("Tab");
      const name = await page.evaluate(() => {
        const at = document.activeElement;
        if (at === null || at === document.body) return "";
        return at.getAttribute("aria-label") ?? at.closest("label")?.innerText ?? at.textContent ?? "";
      });
      if (name === "") break;
      reached.add(name.split("\n")[0].trim().slice(0, 24));
    }
    const names = [...reached].join("|");
    for (const part of ["Model explorer", "Hard", "Name", "Weight of row 0", "Weight of row 2", "Image", "Open your own", "Sharpness",
      "Head", "Centre, row", "enabled", "Border rule", "Stride", "Dilation", "Query, row", "Lock"]) {
      assert.ok(names.includes(part), `${part} is not among ${names}`);
    }
    const image = page.getByRole("button", { name: /^Image, query/ });
    await image.focus();
    for (const key of ["ArrowDown", "ArrowDown", "ArrowRight", "Shift+ArrowLeft"]) await page.keyboard.press(key);
    assert.match(await image.getAttribute("aria-label"), /query at row 18, column 16\./);
    await page.keyboard.press("Enter");
    assert.equal(await button(page, "Lock the query").getAttribute("aria-pressed"), "true");
    await page.waitForFunction(() => /row 18, column 16/.test(document.querySelector("[aria-live]").textContent));
    const before = await shown(page, "error");
    await page.getByRole("slider", { name: /Sharpness/ }).focus();
    await page.keyboard.press("End");
    assert.ok((await shown(page, "error")) < before);
    assert.deepEqual(seen, []);
    await close();
  },

  async "the pointer moves the query, a click locks it, dragging moves a centre"(browser) {
    const { page, close } = await atBench(browser);
    const image = page.getByRole("button", { name: /^Image, query/ });
    const box = await image.boundingBox();
    const at = (row, column) => [box.x + ((column + 0.5) / 48) * box.width, box.y + ((row + 0.5) / 48) * box.height];
    await page.mouse.move(...at(7, 30));
    assert.match(await image.getAttribute("aria-label"), /row 7, column 30\./);
    await page.mouse.down();
    await page.mouse.up();
    await page.mouse.move(...at(40, 3));
    assert.match(await image.getAttribute("aria-label"), /row 7, column 30\./);
    const grip = page.locator('[data-head="4"] .dot');
    await grip.scrollIntoViewIfNeeded();
    const disc = await grip.boundingBox();
    await page.mouse.move(disc.x + disc.width / 2, disc.y + disc.height / 2);
    await page.mouse.down();
    await page.mouse.move(disc.x + disc.width / 2 + 40, disc.y + disc.height / 2, { steps: 4 });
    await page.mouse.up();
    const column = Number(await page.getByRole("spinbutton", { name: "Centre, column" }).inputValue());
    assert.ok(column > 0.3 && column < 1.2, String(column));
    await close();
  },

  async "a link restores the view"(browser) {
    const { page, close } = await atBench(browser);
    await page.getByRole("combobox", { name: "Border rule" }).selectOption("circular");
    await page.getByRole("combobox", { name: "Name" }).selectOption("emboss");
    await page.getByRole("combobox", { name: "Stride" }).selectOption("2");
    await page.waitForFunction(() => location.hash.includes("stride=2"));
    const hash = new URL(page.url()).hash;
    const error = await shown(page, "error");
    await close();
    const again = await atBench(browser, { hash });
    assert.equal(await shown(again.page, "error"), error);
    assert.equal(await again.page.getByRole("combobox", { name: "Border rule" }).inputValue(), "circular");
    await again.close();
  },

  async "the visitor's image is used, and a text file named .png is rejected with a message"(browser) {
    const { page, seen, close } = await atBench(browser);
    const file = page.getByLabel("Open your own");
    await file.setInputFiles({ name: "words.png", mimeType: "image/png", buffer: Buffer.from("not a picture") });
    await page.getByRole("alert").filter({ hasText: "must be an image" }).waitFor();
    const picture = await page.screenshot({ clip: { x: 0, y: 0, width: 200, height: 120 } });
    await file.setInputFiles({ name: "mine.png", mimeType: "image/png", buffer: picture });
    await page.waitForFunction(() => document.querySelector(".pictures canvas").width === 64);
    assert.equal(await page.evaluate(() => document.querySelector(".pictures canvas").height), 38);
    assert.deepEqual(seen, []);
    await close();
  },

  async "touch moves the query, and targets are at least 24 px"(browser) {
    const { page, close } = await atBench(browser, { viewport: { width: 390, height: 800 }, hasTouch: true, isMobile: true });
    const image = page.getByRole("button", { name: /^Image, query/ });
    await image.scrollIntoViewIfNeeded();
    const box = await image.boundingBox();
    await page.touchscreen.tap(box.x + box.width * 0.99, box.y + box.height * 0.01);
    assert.match(await image.getAttribute("aria-label"), /row 0, column 47\./);
    const small = await page.evaluate(() =>
      [...document.querySelectorAll("button, select, input, .grip")]
        .map((target) => ({ box: target.getBoundingClientRect(), words: target.outerHTML.slice(0, 120) }))
        .filter(({ box }) => box.width < 24 || box.height < 24)
        .map(({ box, words }) => `${box.width} x ${box.height}: ${words}`),
    );
    assert.deepEqual(small, []);
    assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), "scrolls sideways");
    await close();
  },

  async "a difference of 0 has the neutral colour"(browser) {
    const { page, close } = await atBench(browser);
    await button(page, /^Hard/).click();
    assert.equal(await shown(page, "error"), 0);
    const colour = await page.getByRole("img", { name: /^Difference/ }).locator("canvas")
      .evaluate((canvas) => [...canvas.getContext("2d").getImageData(0, 0, 1, 1).data]);
    assert.ok(Math.min(...colour) > 240, String(colour));
    await close();
  },

  async "attention, convolution, difference and error are in one row without scrolling"(browser) {
    for (const [width, height] of [[1440, 900], [1024, 768]]) {
      const { page, close } = await atBench(browser, { viewport: { width, height } });
      const parts = page.locator(".payoff > *");
      assert.equal(await parts.count(), 4);
      const boxes = await Promise.all((await parts.all()).map((part) => part.boundingBox()));
      for (const box of boxes) {
        assert.equal(Math.round(box.y), Math.round(boxes[0].y));
        assert.ok(box.y + box.height <= height, `${width}: ends at ${box.y + box.height}`);
      }
      await close();
    }
  },

  async "at 1024 px, the error and its explanation are not a column of single words"(browser) {
    const { page, close } = await atBench(browser, { viewport: { width: 1024, height: 768 } });
    const error = page.getByRole("region", { name: "Error and bound" });
    const explanation = await error.locator("p").boundingBox();
    assert.ok(explanation.width > 220, `the explanation is ${explanation.width} px wide`);
    for (const term of await error.locator("dt").all()) {
      const { height } = await term.boundingBox();
      assert.ok(height < 60, `${await term.innerText()}: ${height} px high`);
    }
    await close();
  },

  async "the difference has a fixed scale, and fades as α grows"(browser) {
    const { page, close } = await atBench(browser, { hash: "#view=bench&bench.alpha=0.5" });
    const difference = page.locator("figure").filter({ has: page.getByRole("img", { name: /^Difference/ }) });
    const found = () =>
      difference.locator("canvas").evaluate((canvas) => {
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return data.reduce((sum, value, at) => sum + (at % 4 === 3 ? 0 : Math.abs(value - 247)), 0) / data.length;
      });
    const scale = await difference.locator(".ends").innerText();
    const strengths = [await found()]; // 0.75 for a difference of 0: the table has no entry exactly in its middle
    const slider = page.getByRole("slider", { name: /Sharpness/ });
    for (const alpha of [2, 5, 40]) {
      await slider.fill(String(Math.log(alpha).toFixed(2)));
      assert.equal(await difference.locator(".ends").innerText(), scale);
      strengths.push(await found());
    }
    for (let later = 1; later < strengths.length; later++) assert.ok(strengths[later] < strengths[later - 1] + 0.2, String(strengths));
    await close();
  },

  async "screenshots at the widths of a phone and a projector"(browser, shots) {
    for (const [name, width, colorScheme] of [["phone", 390, "light"], ["projector", 1920, "light"], ["dark", 1280, "dark"]]) {
      const { page, close } = await atBench(browser, { viewport: { width, height: 1000 }, colorScheme, reducedMotion: "reduce" });
      await button(page, /^Soft heads/).click();
      await page.screenshot({ path: `${shots}/bench-${name}.png`, fullPage: true });
      await close();
    }
  },
};
