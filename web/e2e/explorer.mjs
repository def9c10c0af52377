/** The model explorer with a payload in it, for the tests in a browser. */
import { opened } from "./browser.mjs";

export const button = (page, name) => page.getByRole("button", { name });
export const image = (page) => page.getByRole("button", { name: /Arrow keys move the query/ });
export const file = (buffer, name = "waves.safetensors") => ({ name, mimeType: "", buffer });

/** The model explorer with a payload that was opened by hand. */
export async function shown(browser, bytes, { hash = "", ...options } = {}) {
  const tab = await opened(browser, { hash: `#view=model${hash}`, ...options });
  await tab.page.getByLabel(/Open a payload/).setInputFiles(file(bytes));
  await image(tab.page).waitFor();
  await painted(tab.page);
  return tab;
}

/** Waits until maps have numbers above them; those out of sight have none. */
async function painted(page) {
  await page.locator(".shows > section:not(.zoom)").first().scrollIntoViewIfNeeded();
  await page.waitForFunction(() => [...document.querySelectorAll(".map .soft")].some((caption) => caption.textContent !== ""));
  await page.evaluate(() => scrollTo(0, 0));
}

/** After the page has painted what it was asked for. */
export const settled = (page) => page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));

/** Where the query stands, in words. */
export const query = async (page) => (await image(page).getAttribute("aria-label")).match(/row (\d+), column (\d+)/).slice(1).map(Number);
