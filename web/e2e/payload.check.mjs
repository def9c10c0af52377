/** The ways for the page to find its payload: inside itself, at its server, opened by the visitor. */
import assert from "node:assert/strict";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { PAGE, opened } from "./browser.mjs";

const BYTES = readFileSync(new URL("../tests/fixtures/payload.safetensors", import.meta.url));
const page = () => readFileSync(PAGE, "utf8");
const embedding = (text) =>
  page().replace("</body>", `<script type="application/octet-stream" id="attnconv-payload">${text}</script></body>`);

/** Opens a changed page from a folder of its own. */
async function withPage(browser, html, use, hash = "") {
  const folder = mkdtempSync(join(tmpdir(), "attnconv-page-"));
  try {
    const file = join(folder, "index.html");
    writeFileSync(file, html);
    const context = await browser.newContext();
    const tab = await context.newPage();
    await tab.goto(pathToFileURL(file).href + hash);
    await use(tab);
    await context.close();
  } finally {
    rmSync(folder, { recursive: true });
  }
}

/** Serves a page and, if there is one, a payload, and writes down what was asked for. */
async function withServer(browser, { html, payload, hash = "" }, use) {
  const asked = [];
  const server = createServer((request, response) => {
    asked.push(request.url);
    if (request.url === "/") response.setHeader("content-type", "text/html").end(html);
    else if (request.url === "/payload" && payload) response.end(payload);
    else response.writeHead(404, { "content-type": "application/json" }).end('{"error": "no payload"}');
  });
  await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
  const context = await browser.newContext();
  const tab = await context.newPage();
  await tab.goto(`http://127.0.0.1:${server.address().port}/${hash}`);
  await use(tab, asked);
  await context.close();
  server.close();
}

const view = (tab) => tab.locator('nav [aria-current="page"]').innerText();
const title = (tab) => tab.locator("header").getByText("Waves").waitFor();
const marked = (html) => html.replace("<head>", '<head><meta name="attnconv-server" content="1">');

export const checks = {
  async "inside the page"(browser) {
    await withPage(browser, embedding(BYTES.toString("base64")), title);
  },

  async "a page with a payload opens on the model, one without on the article, and a link wins"(browser) {
    const own = embedding(BYTES.toString("base64"));
    const shows = (wanted) => async (tab) => {
      await title(tab);
      assert.equal(await view(tab), wanted);
    };
    await withPage(browser, own, async (tab) => {
      await shows("Model explorer")(tab);
      const before = await tab.evaluate(() => history.length);
      await tab.getByRole("button", { name: "Freeze", exact: true }).click();
      await tab.waitForFunction(() => location.hash.includes("model.frozen=true"));
      assert.equal(await tab.evaluate(() => history.length), before, "the way back does not lead over the article");
    });
    await withPage(browser, own, shows("Theorem bench"), "#view=bench");
    await withServer(browser, { html: marked(page()), payload: BYTES }, shows("Model explorer"));
    await withServer(browser, { html: marked(page()), payload: BYTES, hash: "#view=article" }, shows("Article"));
    const { page: tab, close } = await opened(browser);
    assert.equal(await view(tab), "Article");
    await close();
  },

  async "inside the page, cut or foreign: said in words"(browser) {
    for (const text of [BYTES.subarray(0, 3000).toString("base64"), "not base64!", Buffer.from("hello, world").toString("base64")]) {
      await withPage(browser, embedding(text), (tab) => tab.getByRole("alert").filter({ hasText: "payload" }).waitFor());
    }
  },

  async "at the server that marks its page, and nowhere else"(browser) {
    await withServer(browser, { html: marked(page()), payload: BYTES }, async (tab, asked) => {
      await title(tab);
      assert.deepEqual(asked, ["/", "/payload"]);
    });
    await withServer(browser, { html: marked(page()) }, async (tab, asked) => {
      await tab.getByRole("heading", { level: 2 }).waitFor();
      await tab.waitForLoadState("networkidle");
      assert.deepEqual(asked, ["/", "/payload"]);
      assert.equal(await tab.getByRole("alert").count(), 0);
    });
    await withServer(browser, { html: page(), payload: BYTES }, async (tab, asked) => {
      await tab.waitForLoadState("networkidle");
      assert.deepEqual(asked, ["/"]);
    });
  },

  async "opened by the visitor; another file is refused in words and the page goes on"(browser) {
    const { page: tab, seen, close } = await opened(browser, { hash: "#view=model" });
    const input = tab.getByLabel(/Open a payload/);
    await input.setInputFiles({ name: "notes.safetensors", mimeType: "", buffer: Buffer.from("these are notes, no tensors") });
    await tab.getByRole("alert").filter({ hasText: "must be a whole safetensors file" }).waitFor();
    await input.setInputFiles({ name: "waves.safetensors", mimeType: "", buffer: BYTES });
    await title(tab);
    assert.equal(await tab.getByRole("alert").count(), 0);
    assert.deepEqual(seen, []);
    await close();
  },
};
