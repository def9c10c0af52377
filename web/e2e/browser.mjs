/** The installed Chromium, and a page of the built file whose errors and requests are written down. */
import { execFileSync } from "node:child_process";
import { existsSync } from "node:fs";
import { createRequire } from "node:module";
import { fileURLToPath, pathToFileURL } from "node:url";
import { chromium } from "playwright-core";

export const PAGE = fileURLToPath(new URL("../dist/index.html", import.meta.url));
export const AXE = createRequire(import.meta.url).resolve("axe-core/axe.min.js");
const NAMES = ["chromium", "chromium-browser", "google-chrome"];

/** Path of the browser in CHROMIUM or on the path; null where there is none. */
export function browserPath() {
  if (process.env.CHROMIUM) return process.env.CHROMIUM;
  for (const name of NAMES) {
    try {
      return execFileSync("sh", ["-c", `command -v ${name}`], { encoding: "utf8" }).trim();
    } catch {
      // not this one
    }
  }
  return null;
}

export async function launched(executablePath) {
  if (!existsSync(PAGE)) throw new Error("dist/index.html: must be built first. Run `npm run build`.");
  return chromium.launch({ executablePath, args: ["--no-sandbox"] });
}

/** Opens the page from disk; `seen` gathers console errors, page errors and requests beyond the file itself. */
export async function opened(browser, { hash = "", ...options } = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  const page = await context.newPage();
  const seen = [];
  const url = pathToFileURL(PAGE).href;
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && seen.push(message.text()));
  page.on("pageerror", (error) => seen.push(String(error)));
  page.on("request", (request) => {
    const asked = request.url();
    if (!asked.startsWith(url) && !/^(data|blob):/.test(asked)) seen.push(`request: ${asked}`);
  });
  await page.goto(url + hash);
  await page.locator("main").waitFor();
  return { page, seen, close: () => context.close() };
}

/** What axe finds in the page as it stands, one line for each rule. */
export async function axeFindings(page) {
  await page.addScriptTag({ path: AXE });
  const { violations } = await page.evaluate(() => globalThis.axe.run());
  return violations.map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.target.join(" ")).join(", ")}`);
}

/** Drops a file in the middle of the page. */
export async function drop(tab, name, type, bytes) {
  const dataTransfer = await tab.evaluateHandle(
    ([name, type, text]) => {
      const transfer = new DataTransfer();
      transfer.items.add(new File([Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))], name, { type }));
      return transfer;
    },
    [name, type, Buffer.from(bytes).toString("base64")],
  );
  await tab.locator("main h2").first().dispatchEvent("drop", { dataTransfer });
}
