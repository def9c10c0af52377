/** The page at the library's own server: `python -m attnconv explore`, with a picture sent through a model. */
import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { once } from "node:events";
import { createInterface } from "node:readline";
import { drop } from "./browser.mjs";

const PYTHON = process.env.ATTNCONV_PYTHON || "python3";
const LONGEST = 180_000; // ms until the server says where it is: it imports torch and makes a model
const IMPORTS = "import sys, attnconv.explorer.server, uvicorn; print(sys.version.split()[0])";

/** Why the server cannot be started here, in words; empty where it can. */
function lack() {
  try {
    execFileSync(PYTHON, ["-c", IMPORTS], { encoding: "utf8", stdio: "pipe" });
    return "";
  } catch (error) {
    const words = String(error.stderr || error.message).trim().split("\n").at(-1);
    return `${PYTHON} cannot import attnconv's server (${words}). Name an interpreter that can in ATTNCONV_PYTHON`;
  }
}

/** Starts the server; gives its address, what it says, and a way to end it as Ctrl-C does. */
async function started(...words) {
  const child = spawn(PYTHON, ["-m", "attnconv", "explore", ...words, "--port", "0", "--no-browser"]);
  const said = [];
  const ended = once(child, "exit");
  const give = setTimeout(() => child.kill("SIGKILL"), LONGEST);
  child.stderr.on("data", (part) => said.push(String(part)));
  const lines = createInterface({ input: child.stdout });
  const address = new Promise((found) => {
    lines.on("line", (line) => {
      said.push(line);
      const named = line.match(/http:\/\/127\.0\.0\.1:\d+\//);
      if (named) found(named[0]);
    });
    lines.on("close", () => found(null));
  });
  const end = async () => {
    child.kill("SIGINT");
    return (await ended)[0];
  };
  const where = await address;
  clearTimeout(give);
  if (where === null) throw new Error(`the server said no address: ${said.join("\n")}`);
  return { address: where, said, end, child };
}

/** A page of the server; `seen` gathers what the console says, what breaks, and requests to anywhere else. */
async function visited(browser, address) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 1000 } });
  const page = await context.newPage();
  const seen = [];
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && seen.push(message.text()));
  page.on("pageerror", (error) => seen.push(String(error)));
  page.on("request", (request) => {
    if (!request.url().startsWith(address) && !/^(data|blob):/.test(request.url())) seen.push(`request: ${request.url()}`);
  });
  await page.goto(address);
  return { page, seen, close: () => context.close() };
}

const alert = (page, words) => page.getByRole("alert").filter({ hasText: words }).waitFor();

async function walk(browser, { address, end, said }) {
  const { page, seen, close } = await visited(browser, address);
  await page.locator("header").getByText("quadratic-digits").waitFor();
  assert.equal(await page.locator('nav [aria-current="page"]').innerText(), "Model explorer");
  const titles = await page.locator(".shows h3").allInnerTexts();
  assert.equal(titles.length, 3);
  for (const title of titles) assert.match(title, /positions alone.*8 × 8 tokens/s);
  await page.waitForFunction(() => /\d/.test(document.querySelector(".map .title .soft").textContent));
  assert.equal(await page.getByText("your image").count(), 0);

  const picture = await page.screenshot({ clip: { x: 0, y: 0, width: 300, height: 200 } });
  const answer = page.waitForResponse(/\/image$/);
  await drop(page, "mine.png", "image/png", picture);
  const { status, length } = await answer.then(async (got) => ({ status: got.status(), length: (await got.body()).length }));
  assert.equal(status, 200);
  assert.ok(length > 1000, `a payload of ${length} bytes`);
  await page.getByText("your image").first().waitFor();
  assert.deepEqual(await page.getByRole("alert").allInnerTexts(), []);
  assert.deepEqual(seen, [], "up to here no error, no warning, and no request but to the server");

  await drop(page, "notes.png", "image/png", "these are notes, no picture");
  await alert(page, "image: must be a whole image, got none of PNG, JPEG");
  assert.equal(await page.getByText("your image").count() > 0, true, "what was shown stays");
  await page.getByRole("button", { name: "Dismiss" }).click();

  assert.equal(await end(), 0, said.join("\n"));
  await drop(page, "mine.png", "image/png", picture);
  await alert(page, "The server of this page does not answer");
  await page.getByText("your image").first().waitFor();
  const elsewhere = seen.filter((words) => words.startsWith("request:"));
  assert.deepEqual(elsewhere, []);
  await close();
}

export const checks = {
  async "a model, an own picture, notes that call themselves a picture, and the end of the server"(browser) {
    const missing = lack();
    if (missing) {
      console.log(`      skipped: ${missing}.`);
      return;
    }
    const server = await started("quadratic-digits");
    try {
      await walk(browser, server);
    } finally {
      server.child.kill("SIGKILL");
    }
  },
};
