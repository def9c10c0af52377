/** The page with the trained models of the documentation, as written by docs/write_page.py, opened from disk. */
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, rmSync, statSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";
import { button, settled } from "./explorer.mjs";

const PYTHON = process.env.ATTNCONV_PYTHON || "python3";
const SCRIPT = fileURLToPath(new URL("../../docs/write_page.py", import.meta.url));
const MODELS = [
  { title: "Quadratic encoding", file: "models/quadratic.js", images: 12, kind: /positions only/ },
  { title: "Learned encoding", file: "models/learned.js", images: 12, kind: /positions only/ },
  { title: "Learned encoding with content", file: "models/learned-content.js", images: 4, kind: /content and positions|stored rows/ },
];

/** Write the page; return the reason why this is not possible, or an empty text. */
function written(folder) {
  try {
    execFileSync(PYTHON, [SCRIPT, folder], { encoding: "utf8", stdio: "pipe" });
    return "";
  } catch (error) {
    const words = String(error.stderr || error.message).trim().split("\n").at(-1);
    if (!/ModuleNotFoundError|ImportError|ENOENT/.test(words)) throw error;
    return `${PYTHON} cannot write the page (${words}). Set ATTNCONV_PYTHON to an interpreter that can`;
  }
}

async function walk(browser, folder) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 } });
  const page = await context.newPage();
  const url = pathToFileURL(join(folder, "index.html")).href;
  const [seen, asked] = [[], []];
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && seen.push(message.text()));
  page.on("pageerror", (error) => seen.push(String(error)));
  page.on("request", (request) => /^(data|blob):/.test(request.url()) || asked.push(request.url()));
  await page.goto(`${url}#view=model`);
  for (const { title, file, images, kind } of MODELS) {
    await button(page, title).and(page.locator(`text="${title}"`)).first().click();
    await page.locator("header").getByText(title, { exact: true }).waitFor();
    await page.getByRole("group", { name: "Images" }).waitFor();
    await settled(page);
    assert.equal(await page.locator(".tiles canvas").count(), images, `${title}: one thumbnail per image`);
    const titles = await page.locator(".shows h3").allInnerTexts();
    assert.equal(titles.length, 4);
    for (const words of titles) assert.match(words, kind);
    const tiles = await page.getByRole("group", { name: "Images" }).innerText();
    assert.match(tiles, /airplane\s+✓ right/);
    assert.match(tiles, /✗[^✓]*(frog|dog|bird)/, `${title}: a wrong prediction`);
    assert.ok(asked.at(-1).endsWith(file), `${file} is loaded when its model is selected`);
    assert.ok(statSync(join(folder, file)).size < 1_800_000);
  }
  await page.goto(`${url}#view=article&article.step=9`);
  await page.reload(); // otherwise the last model stays open
  await page.getByText(`${MODELS[0].title}: first`).waitFor();
  assert.equal(await page.getByText(/sketch/i).count(), 0, "step 9 shows the first model");
  assert.deepEqual(seen, []);
  assert.deepEqual(asked.filter((address) => !address.startsWith("file:")), []);
  await context.close();
}

export const checks = {
  async "three trained models open from disk, with labelled images and predictions"(browser) {
    const folder = mkdtempSync(join(tmpdir(), "attnconv-page-"));
    try {
      const missing = written(folder);
      if (missing) console.log(`      skipped: ${missing}.`);
      else await walk(browser, folder);
    } finally {
      rmSync(folder, { recursive: true });
    }
  },
};
