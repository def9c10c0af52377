/** The installed Chromium, and pages of the built file with a record of their errors and requests. */
import { execFileSync } from "node:child_process";
import { existsSync } from "node:fs";
import { createRequire } from "node:module";
import { fileURLToPath, pathToFileURL } from "node:url";
import { chromium } from "playwright-core";

export const PAGE = fileURLToPath(new URL("../dist/index.html", import.meta.url));
export const AXE = createRequire(import.meta.url).resolve("axe-core/axe.min.js");
const NAMES = ["chromium", "chromium-browser", "google-chrome"];

/** Return the path of the browser, from CHROMIUM or PATH; null if there is none. */
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
  if (!existsSync(PAGE)) throw new Error("dist/index.html: must exist. Run `npm run build`.");
  return chromium.launch({ executablePath, args: ["--no-sandbox"] });
}

/** Open the page from disk; `seen` collects console errors, page errors and requests other than the file itself. */
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

/** Return a function that returns the time, in ms, that the page's main thread has computed; waiting for other processes does not count. */
async function computing(page) {
  const client = await page.context().newCDPSession(page);
  await client.send("Performance.enable", { timeDomain: "threadTicks" });
  return async () => {
    const { metrics } = await client.send("Performance.getMetrics");
    const parts = metrics.filter(({ name }) => ["ScriptDuration", "LayoutDuration", "RecalcStyleDuration"].includes(name));
    return 1000 * parts.reduce((sum, { value }) => sum + value, 0);
  };
}

/**
 * Return the computing time per frame in million exponentials; `draw` draws some frames and returns their number.
 * Machines and their load differ, so both are measured in turn with the same clock.
 */
export async function exponentialsPerFrame(page, draw) {
  const spent = await computing(page);
  const times = { frames: 0, exponentials: 0 };
  let frames = 0;
  for (let round = 0; round < 4; round++) {
    const start = await spent();
    frames += await draw();
    const between = await spent();
    await page.evaluate(
      () =>
        new Promise((done) =>
          requestAnimationFrame(() => {
            let sum = 0;
            for (let i = 0; i < 1e7; i += 1) sum += Math.exp(-1e-7 * i);
            done(sum);
          }),
        ),
    );
    times.frames += between - start;
    times.exponentials += (await spent()) - between;
  }
  const million = times.exponentials / 40;
  console.log(`      ${(times.frames / frames).toFixed(1)} ms per frame, a million exponentials in ${million.toFixed(1)} ms`);
  return times.frames / frames / million;
}

/** Return axe's findings in the current page, one line per rule. */
export async function axeFindings(page) {
  await page.addScriptTag({ path: AXE });
  const { violations } = await page.evaluate(() => globalThis.axe.run());
  return violations.map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.target.join(" ")).join(", ")}`);
}

/** Drop a file on the page. */
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
