/** Sources of the payload: embedded in the page, from its server, or opened by the visitor. */
import assert from "node:assert/strict";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { gzipSync } from "node:zlib";
import { PAGE, axeFindings, drop, opened } from "./browser.mjs";
import { made } from "./payloads.mjs";

const BYTES = readFileSync(new URL("../tests/fixtures/payload.safetensors", import.meta.url));
const page = () => readFileSync(PAGE, "utf8");
const embedding = (text) =>
  page().replace("</body>", `<script type="application/octet-stream" id="attnconv-payload">${text}</script></body>`);

/** Open a modified page from a temporary folder. */
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

/** Serve a page and optionally a payload, and record the requests. */
async function withServer(browser, { html, payload, hash = "", answer = null }, use) {
  const asked = [];
  const server = createServer((request, response) => {
    asked.push(request.url);
    if (request.url === "/") response.setHeader("content-type", "text/html").end(html);
    else if (request.url === "/payload" && payload) response.end(payload);
    else if (request.url === "/image" && answer) response.writeHead(...answer[0]).end(answer[1]);
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
const marked = (html, mark = "payload") => html.replace("<head>", `<head><meta name="attnconv-server" content="${mark}">`);

const alerts = (tab) => tab.getByRole("alert").allInnerTexts();

const LARGEST = 120_000; // bytes of the compressed page, without a payload and the font

/** Use a page on disk with a list of models: two, and one without a file. `asked` lists the requested files. */
async function withModels(browser, html, use, hash = "#view=model") {
  const folder = mkdtempSync(join(tmpdir(), "attnconv-page-"));
  const titles = { plain: "Plain", other: "Other", lost: "Lost" };
  const list = Object.entries(titles).map(([name, title]) => ({ title, file: `models/${name}.js` }));
  mkdirSync(join(folder, "models"));
  for (const [name, title] of Object.entries(titles).slice(0, 2)) {
    const payload = made({ layers: 1, heads: 3, side: name === "plain" ? 8 : 6, title: `${title} model` }).toString("base64");
    writeFileSync(join(folder, "models", `${name}.js`), `attnconvModel("${name}", "${payload}");\n`);
  }
  writeFileSync(join(folder, "index.html"), html.replace("</body>", `<script type="application/json" id="attnconv-models">${JSON.stringify(list)}</script></body>`));
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 } });
  const [tab, asked] = [await context.newPage(), []];
  tab.on("request", (request) => !request.url().startsWith("data:") && asked.push(request.url().split("/").slice(-2).join("/")));
  await tab.goto(pathToFileURL(join(folder, "index.html")).href + hash);
  await use(tab, asked);
  await context.close();
  rmSync(folder, { recursive: true });
}

const models = (tab) => tab.getByRole("group", { name: "Models" });

export const checks = {
  async "models that come with the page open on a click, from disk, and are requested only then"(browser) {
    await withModels(browser, embedding(BYTES.toString("base64")), async (tab, asked) => {
      await title(tab);
      assert.equal(asked.length, 1, `only the page: ${asked}`);
      const tabs = models(tab);
      await tabs.getByRole("button", { name: "Other" }).click();
      await tab.locator("header").getByText("Other model").waitFor();
      assert.deepEqual(asked.slice(1), ["models/other.js"]);
      assert.equal(await tabs.getByRole("button", { name: "Other" }).getAttribute("aria-pressed"), "true");
      await tabs.getByRole("button", { name: "Lost" }).click();
      await tab.getByRole("alert").filter({ hasText: "models/lost.js" }).waitFor();
      await tabs.getByRole("button", { name: "Plain" }).click();
      await tab.locator("header").getByText("Plain model").waitFor();
      assert.equal(await tab.getByRole("alert").count(), 0);
      await tabs.getByRole("button", { name: "Other" }).click();
      await tab.locator("header").getByText("Other model").waitFor();
      assert.equal(asked.filter((file) => file === "models/other.js").length, 1);
      await tab.waitForFunction(() => location.hash.includes("model.own=models%2Fother.js"));
      await drop(tab, "waves.safetensors", "", BYTES);
      await title(tab);
      await tab.waitForFunction(() => !location.hash.includes("model.own"));
    });
    await withModels(browser, page(), async (tab, asked) => {
      await tab.getByRole("heading", { level: 2 }).first().waitFor();
      assert.equal(asked.length, 1, `the article needs no model: ${asked}`);
      await tab.getByRole("navigation", { name: "Views" }).getByRole("button", { name: "Model explorer" }).click();
      await tab.locator("header").getByText("Plain model").waitFor();
      assert.deepEqual(asked.slice(1), ["models/plain.js"]);
    }, "#view=article");
  },

  async "a link restores the page's models: the one that is shown, and the one that it is compared with"(browser) {
    let hash = "";
    await withModels(browser, embedding(BYTES.toString("base64")), async (tab) => {
      await models(tab).getByRole("button", { name: "Plain" }).click();
      await tab.locator("header").getByText("Plain model").waitFor();
      await models(tab).getByRole("combobox", { name: "Compare with" }).selectOption("Other");
      await tab.getByRole("heading", { name: /B · Other model/ }).waitFor();
      await tab.getByRole("button", { name: "B, layer 0, head 1: enlarge", exact: true }).click();
      await tab.getByRole("heading", { name: /^B, layer 0, head 1/ }).waitFor();
      assert.deepEqual(await axeFindings(tab), []);
      await tab.waitForFunction(() => location.hash.includes("model.other=true"));
      hash = new URL(tab.url()).hash;
      const views = tab.getByRole("navigation", { name: "Views" });
      await views.getByRole("button", { name: "Article" }).click();
      await views.getByRole("button", { name: "Model explorer" }).click();
      await tab.getByRole("heading", { name: /^B, layer 0, head 1/ }).waitFor();
    });
    await withModels(browser, embedding(BYTES.toString("base64")), async (tab) => {
      await tab.getByRole("heading", { name: /A · Plain model/ }).waitFor();
      await tab.getByRole("heading", { name: /B · Other model/ }).waitFor();
      await tab.getByRole("heading", { name: /^B, layer 0, head 1/ }).waitFor();
    }, hash);
  },

  async "the page is small"() {
    const bytes = gzipSync(page().replace(/url\(["']?data:font[^)]*\)/, ""), { level: 9 }).length;
    console.log(`      ${bytes} bytes compressed, without a payload and the font`);
    assert.ok(bytes < LARGEST, `${bytes}`);
  },

  async "a payload embedded in the page"(browser) {
    await withPage(browser, embedding(BYTES.toString("base64")), title);
  },

  async "a page with a payload opens the model explorer, one without the article, and a link has priority"(browser) {
    const own = embedding(BYTES.toString("base64"));
    const shows = (wanted) => async (tab) => {
      await title(tab);
      assert.equal(await view(tab), wanted);
    };
    await withPage(browser, own, async (tab) => {
      await shows("Model explorer")(tab);
      const before = await tab.evaluate(() => history.length);
      await tab.getByRole("button", { name: "Lock", exact: true }).click();
      await tab.waitForFunction(() => location.hash.includes("model.frozen=true"));
      assert.equal(await tab.evaluate(() => history.length), before, "the article is not in the browser's history");
    });
    await withPage(browser, own, shows("Theorem workbench"), "#view=bench");
    await withServer(browser, { html: marked(page()), payload: BYTES }, shows("Model explorer"));
    await withServer(browser, { html: marked(page()), payload: BYTES, hash: "#view=article" }, shows("Article"));
    const { page: tab, close } = await opened(browser);
    assert.equal(await view(tab), "Article");
    await close();
  },

  async "an invalid embedded payload shows a message"(browser) {
    for (const text of [BYTES.subarray(0, 3000).toString("base64"), "not base64!", Buffer.from("hello, world").toString("base64")]) {
      await withPage(browser, embedding(text), (tab) => tab.getByRole("alert").filter({ hasText: "payload" }).waitFor());
    }
  },

  async "a payload is requested only from a server that marks its page"(browser) {
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

  async "a payload opened by the visitor; an invalid file is rejected with a message"(browser) {
    const { page: tab, seen, close } = await opened(browser, { hash: "#view=model" });
    const input = tab.getByLabel(/Open a payload/);
    await input.setInputFiles({ name: "notes.safetensors", mimeType: "", buffer: Buffer.from("these are notes, no tensors") });
    await tab.getByRole("alert").filter({ hasText: "must be a complete safetensors file" }).waitFor();
    await input.setInputFiles({ name: "waves.safetensors", mimeType: "", buffer: BYTES });
    await title(tab);
    assert.equal(await tab.getByRole("alert").count(), 0);
    assert.deepEqual(seen, []);
    await close();
  },

  async "a payload can be dropped in any view, and an invalid one is rejected with a message"(browser) {
    for (const hash of ["#view=article", "#view=bench", "#view=model"]) {
      const { page: tab, seen, close } = await opened(browser, { hash });
      await drop(tab, "notes.safetensors", "", "these are notes, no tensors");
      await tab.getByRole("alert").filter({ hasText: "must be a complete safetensors file" }).waitFor();
      await tab.getByRole("button", { name: "Dismiss" }).click();
      assert.deepEqual(await alerts(tab), []);
      await drop(tab, "WAVES.SAFETENSORS", "", BYTES);
      await title(tab);
      assert.equal(await view(tab), "Model explorer");
      assert.deepEqual(seen, []);
      await close();
    }
  },

  async "without a model, an image dropped on the workbench is used there, and elsewhere rejected with a message"(browser) {
    const { page: tab, seen, close } = await opened(browser, { hash: "#view=article" });
    const picture = await tab.screenshot({ clip: { x: 0, y: 0, width: 200, height: 120 } });
    for (const name of ["Article", "Model explorer"]) {
      await tab.getByRole("navigation", { name: "Views" }).getByRole("button", { name }).click();
      await drop(tab, "mine.png", "image/png", picture);
      await tab.getByRole("alert").filter({ hasText: "mine.png: this page has no model" }).waitFor();
      assert.equal(await view(tab), name);
    }
    await drop(tab, "words.txt", "text/plain", "words");
    await tab.getByRole("alert").filter({ hasText: "words.txt: must be a payload (.safetensors) or an image." }).waitFor();
    await tab.getByRole("button", { name: "Theorem workbench" }).click();
    await drop(tab, "words.txt", "text/plain", "words");
    await tab.getByRole("alert").filter({ hasText: "must be an image that this browser can read" }).waitFor();
    await drop(tab, "mine.png", "image/png", picture);
    await tab.waitForFunction(() => document.querySelector("canvas").width === 64);
    assert.equal(await tab.getByRole("combobox", { name: "Image" }).inputValue(), "own");
    assert.deepEqual(await alerts(tab), []);
    assert.deepEqual(seen, []);
    await close();
  },

  async "an image dropped on a page with a model is sent to its server"(browser) {
    const served = { html: marked(page(), "images"), hash: "#view=article" };
    await withServer(browser, { ...served, answer: [[415, { "content-type": "application/json" }], '{"error": "No picture, said the server."}'] }, async (tab) => {
      await drop(tab, "mine.png", "image/png", "pixels");
      await tab.getByRole("alert").filter({ hasText: "No picture, said the server." }).waitFor();
      assert.equal(await view(tab), "Article");
    });
    await withServer(browser, { ...served, answer: [[200], BYTES] }, async (tab, asked) => {
      await drop(tab, "mine.png", "image/png", "pixels");
      await title(tab);
      assert.equal(await view(tab), "Model explorer");
      assert.deepEqual(asked, ["/", "/payload", "/image"]);
      await tab.getByRole("button", { name: "Theorem workbench" }).click();
      await drop(tab, "mine.png", "image/png", "pixels");
      await tab.getByRole("alert").filter({ hasText: "must be an image that this browser can read" }).waitFor();
      assert.equal(asked.length, 3, "on the workbench an image stays in the page");
    });
  },

  async "the field for images is shown only if the server accepts them"(browser) {
    for (const [mark, fields] of [["images", 1], ["payload", 0], ["1", 0], ["", 0]]) {
      await withServer(browser, { html: marked(page(), mark), payload: BYTES, hash: "#view=model" }, async (tab, asked) => {
        await title(tab);
        assert.equal(await tab.getByLabel(/Run the model on/).count(), fields, mark);
        if (fields === 0) {
          await drop(tab, "mine.png", "image/png", "pixels");
          await tab.getByRole("alert").filter({ hasText: "this page has no model" }).waitFor();
        }
        assert.deepEqual(asked, ["/", "/payload"]);
      });
    }
  },
};
