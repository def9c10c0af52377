/** The opening: the claim in motion, without scrolling, until it is touched. */
import assert from "node:assert/strict";
import { axeFindings, exponentialsPerFrame, opened } from "./browser.mjs";

const OPENING = { hash: "#view=article" };
const at = (progress, round = 0) => ({ hash: `#view=article&article.playing=false&article.progress=${progress}&article.round=${round}` });
const button = (page, name) => page.getByRole("button", { name });
const progress = (page) => page.getByRole("slider").inputValue().then(Number);
const apart = (page) => page.getByTestId("apart").innerText();

/** Return the mean distance of the difference's colours from its middle colour. */
const strength = (page) =>
  page.locator(".apart canvas").evaluate((canvas) => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return data.reduce((sum, value, at) => sum + (at % 4 === 3 ? 0 : Math.abs(value - 247)), 0) / data.length;
  });

export const checks = {
  async "opens the page without a payload: title, authors and links, no requests, no axe findings"(browser) {
    for (const colorScheme of ["light", "dark"]) {
      const { page, seen, close } = await opened(browser, { ...at(0.5), colorScheme });
      assert.match(await page.getByRole("heading", { level: 2 }).innerText(), /^Self-attention can be a convolution/);
      for (const words of ["Cordonnier", "Loukas", "Jaggi", "ICLR 2020"]) await page.getByText(words).first().waitFor();
      const links = await page.locator(".opening a").evaluateAll((found) => found.map((link) => link.href));
      assert.deepEqual(links.slice(0, 2), ["https://arxiv.org/abs/1911.03584", "https://github.com/epfml/attention-cnn"]);
      assert.deepEqual(await axeFindings(page), []);
      assert.deepEqual(seen, []);
      await close();
    }
    const { page, close } = await opened(browser);
    assert.equal(await page.locator(".opening").count(), 1);
    assert.equal(await page.locator("header nav button").first().innerText(), "Article");
    await close();
  },

  async "plays until it is touched: by a pointer, by a key, by its button"(browser) {
    const acts = [
      (page) => page.mouse.click(700, 300),
      (page) => page.keyboard.press("a"),
      (page) => button(page, "Pause").click(),
    ];
    for (const act of acts) {
      const { page, seen, close } = await opened(browser, OPENING);
      await page.waitForFunction(() => document.querySelector("input[type=range]").valueAsNumber > 0.02);
      await act(page);
      await button(page, "Play").waitFor();
      const found = await progress(page);
      await page.waitForTimeout(300);
      assert.equal(await progress(page), found);
      await page.waitForFunction(() => location.hash.includes("playing=false"));
      await button(page, "Play").click();
      await page.waitForFunction((old) => document.querySelector("input[type=range]").valueAsNumber > old, found);
      assert.deepEqual(seen, []);
      await close();
    }
  },

  async "the difference fades to nothing on a fixed scale as the slider moves to its end, for every kernel"(browser) {
    for (let round = 0; round < 4; round++) {
      const { page, close } = await opened(browser, at(0.4, round));
      const ends = () => page.locator(".ends").innerText();
      const [scale, strengths] = [await ends(), [await strength(page)]];
      for (const time of [0.5, 0.6, 0.8]) {
        await page.getByRole("slider").fill(String(time));
        strengths.push(await strength(page));
        assert.equal(await ends(), scale);
      }
      await page.getByRole("slider").fill("1");
      strengths.push(await strength(page));
      for (let later = 1; later < strengths.length; later++) assert.ok(strengths[later] < strengths[later - 1] + 0.2, String(strengths));
      assert.ok(strengths[0] > 4, String(strengths));
      assert.ok(strengths.at(-1) < 1, String(strengths)); // the table has no entry exactly in its middle
      assert.match(await apart(page), /^0, up to rounding$/);
      await close();
    }
  },

  async "where motion is reduced, the end is shown with the slider"(browser) {
    const { page, close } = await opened(browser, { ...OPENING, reducedMotion: "reduce" });
    await page.waitForTimeout(200);
    assert.equal(await progress(page), 1);
    assert.match(await apart(page), /^0, up to rounding$/);
    assert.equal(await page.locator(".play").count(), 0);
    await page.getByRole("slider").fill("0.3");
    assert.match(await apart(page), /^at most/);
    await close();
  },

  async "heads, attention, convolution and difference are in one row without scrolling; on a phone nothing is wider than the page"(browser, shots) {
    for (const colorScheme of ["light", "dark"]) {
      for (const [width, height] of [[1440, 900], [1024, 768], [390, 844]]) {
        const { page, close } = await opened(browser, { ...at(0.62), viewport: { width, height }, colorScheme });
        const boxes = await Promise.all((await page.locator(".row canvas").all()).map((canvas) => canvas.boundingBox()));
        assert.equal(boxes.length, 4);
        for (const box of boxes) assert.ok(box.y >= 0 && box.y + box.height <= height, JSON.stringify([width, box]));
        if (width > 390) {
          const { y } = boxes[0];
          for (const box of boxes) assert.ok(box.y >= y && box.y + box.height <= y + boxes[0].height, JSON.stringify(boxes));
          const end = await button(page, /Ten steps/).boundingBox();
          assert.ok(end.y + end.height <= height, `${width}: the links end at ${end.y + end.height}`);
        }
        assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), `${width} scrolls sideways`);
        await page.screenshot({ path: `${shots}/opening-${width}-${colorScheme}.png` });
        await close();
      }
    }
  },

  async "a frame takes less time than two million exponentials"(browser) {
    const { page, close } = await opened(browser, { ...OPENING, viewport: { width: 1440, height: 900 } });
    await page.waitForTimeout(1000);
    const each = await exponentialsPerFrame(page, () =>
      page.evaluate(
        () =>
          new Promise((done) => {
            const start = performance.now();
            let count = 0;
            requestAnimationFrame(function next(now) {
              count += 1;
              if (now - start > 1000) done(count);
              else requestAnimationFrame(next);
            });
          }),
      ),
    );
    assert.ok(each < 2, `${each} million exponentials`);
    await close();
  },

  async "leads to the ten steps and to the model explorer"(browser) {
    const { page, close } = await opened(browser, at(1));
    await button(page, /Ten steps/).click();
    await page.getByText("1 of 10", { exact: true }).waitFor();
    await button(page, /Previous/).click();
    await button(page, /What do trained networks learn/).click();
    await page.getByLabel(/Open a payload/).waitFor();
    await close();
  },
};
