/** The model explorer in the browser. */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { axeFindings, opened } from "./browser.mjs";
import { made } from "./payloads.mjs";

const FIXTURES = new URL("../tests/fixtures/", import.meta.url);
const button = (page, name) => page.getByRole("button", { name });
const image = (page) => page.getByRole("button", { name: /Arrow keys move the query/ });
const file = (buffer, name = "waves.safetensors") => ({ name, mimeType: "", buffer });

/** The model explorer with a payload that was opened by hand. */
async function shown(browser, bytes, { hash = "", ...options } = {}) {
  const tab = await opened(browser, { hash: `#view=model${hash}`, ...options });
  await tab.page.getByLabel(/Open a payload/).setInputFiles(file(bytes));
  await image(tab.page).waitFor();
  await painted(tab.page);
  return tab;
}

/** Waits until the first map has a number above it. */
const painted = (page) => page.waitForFunction(() => document.querySelector(".map .soft")?.textContent !== "");

/** A hash of the pixels of a map. */
const pixels = (page, map = 0) =>
  page.evaluate((index) => {
    const canvas = document.querySelectorAll(".map canvas")[index];
    const bytes = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    return bytes.reduce((hash, byte) => (Math.imul(hash, 31) + byte) | 0, 7);
  }, map);

const settled = (page) => page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));

/** Frames a second while the mouse goes over the first map: [median, worst decile]. */
async function speed(page) {
  const box = await page.locator(".map .stage").first().boundingBox();
  await page.evaluate(() => {
    globalThis.times = [];
    const note = (time) => {
      globalThis.times.push(time);
      globalThis.noting = requestAnimationFrame(note);
    };
    requestAnimationFrame(note);
  });
  for (let step = 0; step < 240; step++) {
    const [down, right] = [Math.abs(((step / 60) % 2) - 1), Math.abs(((step / 25) % 2) - 1)];
    await page.mouse.move(box.x + 1 + right * (box.width - 2), box.y + 1 + down * (box.height - 2));
  }
  const times = await page.evaluate(() => (cancelAnimationFrame(globalThis.noting), globalThis.times));
  const gaps = times.slice(1).map((time, index) => time - times[index]).sort((one, other) => one - other);
  return [0.5, 0.9].map((share) => 1000 / gaps[Math.floor(share * gaps.length)]);
}

export const checks = {
  async "opens without an error or a request, and axe finds nothing"(browser) {
    for (const colorScheme of ["light", "dark"]) {
      for (const bytes of [made({ layers: 2, side: 8, times: 3 }), readFileSync(new URL("payload.safetensors", FIXTURES))]) {
        const { page, seen, close } = await shown(browser, bytes, { colorScheme, hash: "&model.zoomed=true" });
        assert.deepEqual(await axeFindings(page), []);
        assert.deepEqual(seen, []);
        await close();
      }
    }
  },

  async "moving the query stays fluid"(browser) {
    for (const options of [{ side: 32 }, { side: 32, kind: "content" }, { side: 64 }]) {
      const { page, seen, close } = await shown(browser, made(options), { viewport: { width: 1280, height: 1000 } });
      await speed(page);
      const [median, worst] = await speed(page);
      console.log(`      ${JSON.stringify(options)}: median ${median.toFixed(1)}, worst decile ${worst.toFixed(1)} frames a second`);
      assert.ok(median > 15, `${median} frames a second`); // on an idle machine 50 and more; others may be measuring here
      assert.deepEqual(seen, []);
      await close();
    }
  },
};
