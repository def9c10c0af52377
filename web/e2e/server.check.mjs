/** The page from the library's server, `python -m attnconv explore`, with an image sent to the model. */
import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { once } from "node:events";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";
import { drop } from "./browser.mjs";

const PYTHON = process.env.ATTNCONV_PYTHON || "python3";
const LONGEST = 180_000; // ms until the server prints its address: it imports torch and creates a model
const IMPORTS = "import sys, attnconv.explorer.server, uvicorn; print(sys.version.split()[0])";

/** Return the reason why the server cannot be started; empty if it can. */
function lack() {
  try {
    execFileSync(PYTHON, ["-c", IMPORTS], { encoding: "utf8", stdio: "pipe" });
    return "";
  } catch (error) {
    const words = String(error.stderr || error.message).trim().split("\n").at(-1);
    return `${PYTHON} cannot import attnconv's server (${words}). Set ATTNCONV_PYTHON to an interpreter that can`;
  }
}

/** Start the server; return its address, its output, and a function that stops it like Ctrl-C. */
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
  if (where === null) throw new Error(`the server printed no address: ${said.join("\n")}`);
  return { address: where, said, end, child };
}

/** Open the server's page; `seen` collects console errors, page errors and requests to other servers. */
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
  for (const title of titles) assert.match(title, /positions only.*8 × 8 tokens/s);
  await page.waitForFunction(() => /\d/.test(document.querySelector(".map .title .soft").textContent));
  assert.equal(await page.getByText("your image").count(), 0);

  const logits = page.locator(".zoom [role=status]").filter({ hasText: "the logits change by" });
  const button = (name) => page.getByRole("button", { name, exact: true });
  await button("layer 0, head 0: enlarge").click();
  await button("switched off").click();
  await logits.filter({ hasText: "Layer 0, head 0 switched off:" }).waitFor();
  await button("layer 2, head 4: enlarge").click();
  await button("nearest convolution").click();
  await logits.filter({ hasText: "Layer 0, head 0 switched off; Layer 2, head 4 replaced with the nearest convolution:" }).waitFor();

  const picture = await page.screenshot({ clip: { x: 0, y: 0, width: 300, height: 200 } });
  const answer = page.waitForResponse(/\/image$/);
  await drop(page, "mine.png", "image/png", picture);
  const { status, length } = await answer.then(async (got) => ({ status: got.status(), length: (await got.body()).length }));
  assert.equal(status, 200);
  assert.ok(length > 1000, `a payload of ${length} bytes`);
  await page.getByText("your image").first().waitFor();
  await logits.waitFor();
  await button("all heads as trained").click();
  await page.getByText("Change the head to see what it contributes").waitFor();
  assert.deepEqual(await page.getByRole("alert").allInnerTexts(), []);
  assert.deepEqual(seen, [], "no errors, no warnings, and no requests to other servers");

  await drop(page, "notes.png", "image/png", "these are notes, no picture");
  await alert(page, /image: .*PNG, JPEG/);
  assert.equal(await page.getByText("your image").count() > 0, true, "the previous payload is still shown");
  await page.getByRole("button", { name: "Dismiss" }).click();

  assert.equal(await end(), 130, said.join("\n"));
  await drop(page, "mine.png", "image/png", picture);
  await alert(page, "The page's server does not respond");
  await page.getByText("your image").first().waitFor();
  const elsewhere = seen.filter((words) => words.startsWith("request:"));
  assert.deepEqual(elsewhere, []);
  await close();
}

/** Start the server, use it and stop it; skipped with a message if it cannot be started. */
async function withServer(words, use) {
  const missing = lack();
  if (missing) {
    console.log(`      skipped: ${missing}.`);
    return;
  }
  const server = await started(...words);
  try {
    await use(server);
  } finally {
    server.child.kill("SIGKILL");
  }
}

export const checks = {
  async "a model, the visitor's image, a text file named .png, and the end of the server"(browser) {
    await withServer(["quadratic-digits", "--data", "digits", "--images", "3"], (server) => walk(browser, server));
  },

  async "a folder of results/, of which only the weights are kept"(browser) {
    const folder = fileURLToPath(new URL("../../results/paper-mini/runs/quadratic", import.meta.url));
    await withServer([folder, "--snapshots", "2"], async ({ address }) => {
      const { page, seen, close } = await visited(browser, address);
      await page.locator("header").getByText("runs/quadratic").waitFor();
      assert.equal(await page.locator(".strip").count(), 4);
      assert.deepEqual(seen, []);
      await close();
    });
  },
};
