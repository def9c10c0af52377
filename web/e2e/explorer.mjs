/** Helpers for browser tests of the model explorer. */
import { opened } from "./browser.mjs";

export const button = (page, name) => page.getByRole("button", { name });
export const image = (page) => page.getByRole("button", { name: /Arrow keys move the query/ });
export const file = (buffer, name = "waves.safetensors") => ({ name, mimeType: "", buffer });

/** Open the model explorer with a payload. */
export async function shown(browser, bytes, { hash = "", ...options } = {}) {
  const tab = await opened(browser, { hash: `#view=model${hash}`, ...options });
  await tab.page.getByLabel(/Open a payload/).setInputFiles(file(bytes));
  await image(tab.page).waitFor();
  await painted(tab.page);
  return tab;
}

/** Wait until the visible maps have numbers above them. */
async function painted(page) {
  await page.locator(".shows > .strip").first().scrollIntoViewIfNeeded();
  await page.waitForFunction(() => [...document.querySelectorAll(".map .soft")].some((caption) => caption.textContent !== ""));
  await page.evaluate(() => scrollTo(0, 0));
}

/** Wait until the page has painted the current state. */
export const settled = (page) => page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));

/** Return the query's row and column from the image's label. */
export const query = async (page) => (await image(page).getAttribute("aria-label")).match(/row (\d+), column (\d+)/).slice(1).map(Number);
