/** The page in a notebook's frame and the library's widget.js, in a page that imitates a notebook. */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { PAGE } from "./browser.mjs";
import { made } from "./payloads.mjs";

const SIDE = 8;
const MARK = "0123abcd";
const SANDBOX = "allow-scripts allow-downloads";
const WIDGET = readFileSync(new URL("../../src/attnconv/explorer/widget.js", import.meta.url), "utf8");
const html = () => {
  const text = made({ layers: 2, heads: 3, side: SIDE, times: 2 }).toString("base64");
  return readFileSync(PAGE, "utf8").replace("</body>", () => `<script type="application/octet-stream" id="attnconv-payload">${text}</script></body>`);
};

/** Imitate a notebook: the widget's module with an anywidget model, and the page in HTML output or in the widget's view. */
async function notebook(browser, { view = false, asked = [0, {}], late = false } = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 1000 } });
  const page = await context.newPage();
  const seen = [];
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && seen.push(message.text()));
  page.on("pageerror", (error) => seen.push(String(error)));
  await page.setContent("<!doctype html><title>notebook</title><main></main>");
  await page.evaluate(
    ({ html, mark, sandbox, asked }) => {
      globalThis.heard = [];
      addEventListener("message", ({ data }) => globalThis.heard.push(data));
      const listeners = new Map();
      const state = { mark, asked, told: null, page: html, sandbox, height: 900, title: "explorer" };
      globalThis.state = state;
      globalThis.model = {
        get: (name) => state[name],
        set: (name, value) => (state[name] = value),
        save_changes: () => {},
        on: (name, listener) => listeners.set(name, listener),
        off: (name) => listeners.delete(name),
      };
      globalThis.ask = (entries) => {
        state.asked = [state.asked[0] + 1, entries];
        listeners.get("change:asked")?.();
      };
      globalThis.output = () => {
        const frame = document.createElement("iframe");
        frame.setAttribute("sandbox", sandbox);
        frame.dataset.attnconv = mark;
        frame.style.cssText = "width: 100%; height: 900px; border: 0";
        frame.srcdoc = html;
        document.querySelector("main").append(frame);
      };
    },
    { html: html(), mark: MARK, sandbox: SANDBOX, asked },
  );
  const output = () => (view ? null : page.evaluate(() => globalThis.output()));
  const frame = page.frameLocator("iframe[data-attnconv]");
  const image = frame.getByRole("button", { name: /Arrow keys move the query/ });
  if (late) {
    await output();
    await image.waitFor();
  }
  await page.evaluate(
    async ({ source, view }) => {
      const { default: widget } = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
      globalThis.close = widget.initialize({ model: globalThis.model });
      if (view) widget.render({ model: globalThis.model, el: document.querySelector("main").attachShadow({ mode: "open" }) });
    },
    { source: WIDGET, view },
  );
  if (!late) await output();
  await image.waitFor();
  const told = (wanted) =>
    page.waitForFunction((text) => JSON.stringify(globalThis.state.told) === text, JSON.stringify(wanted)).catch(async (error) => {
      throw new Error(`told ${JSON.stringify(await page.evaluate(() => globalThis.state.told))}, wanted ${JSON.stringify(wanted)}`, { cause: error });
    });
  return { page, frame, image, seen, told, ask: (entries) => page.evaluate((it) => globalThis.ask(it), entries), close: () => context.close() };
}

const START = { layer: 0, head: 0, query: [4, 4], image: 0, time: 1, part: "both" };
const AT = (row, column) => new RegExp(`row ${row}, column ${column}\\.`);

/** Send a message to the page from its parent, without the widget. */
const post = (page, data) => page.evaluate((it) => document.querySelector("iframe").contentWindow.postMessage(it, "*"), data);

export const checks = {
  async "in HTML output, the page reports its selection and can be moved"(browser, shots) {
    const { page, frame, image, seen, told, ask, close } = await notebook(browser);
    await told(START);
    const box = await image.boundingBox();
    await image.click({ position: { x: (1.5 * box.width) / SIDE, y: (6.5 * box.height) / SIDE } });
    await told({ ...START, query: [6, 1] });
    await frame.getByRole("button", { name: /enlarge/i }).nth(4).click();
    await told({ ...START, layer: 1, head: 1, query: [6, 1] });
    await ask({ layer: 0, head: 2, query: [0, 7], image: 0 });
    await told({ ...START, head: 2, query: [0, 7] });
    assert.match(await image.getAttribute("aria-label"), AT(0, 7));
    assert.match(await frame.locator("#zoom-title").innerText(), /head 2/i);
    await frame.getByRole("button", { name: "Article" }).click();
    await ask({ layer: 0, query: [3, 3] });
    await told({ ...START, head: 2, query: [3, 3] });
    await image.waitFor();
    await page.screenshot({ path: `${shots}/notebook.png` });
    assert.deepEqual(seen, []);
    await close();
  },

  async "the widget may start after the page, or have a request before it"(browser) {
    const late = await notebook(browser, { late: true });
    await late.told(START);
    await late.close();
    for (const view of [false, true]) {
      const early = await notebook(browser, { view, asked: [1, { layer: 1, head: 1, query: [2, 5] }] });
      await early.told({ ...START, layer: 1, head: 1, query: [2, 5] });
      await early.image.focus();
      await early.page.keyboard.press("ArrowDown");
      await early.told({ ...START, layer: 1, head: 1, query: [3, 5] });
      assert.deepEqual(early.seen, []);
      await early.close();
    }
  },

  async "selections are sent at most ten times per second, the last one always"(browser) {
    const { page, image, told, close } = await notebook(browser);
    await told(START);
    const box = await image.boundingBox();
    const start = await page.evaluate(() => ((globalThis.heard.length = 0), performance.now()));
    for (let step = 0; step <= 120; step++) {
      await page.mouse.move(box.x + 2 + ((step % 40) / 40) * (box.width - 4), box.y + 2 + (step / 121) * (box.height - 4));
    }
    await page.mouse.move(box.x + 2, box.y + 2);
    await told({ ...START, query: [0, 0] });
    const [count, seconds] = await page.evaluate((from) => [globalThis.heard.length, (performance.now() - from) / 1000], start);
    assert.ok(count >= 2 && count <= 10 * seconds + 2, `${count} messages in ${seconds} s`);
    await close();
  },

  async "invalid messages, and messages that are not from the parent, are ignored"(browser) {
    const { page, frame, image, seen, told, close } = await notebook(browser);
    await told(START);
    await page.evaluate(() => (globalThis.heard.length = 0));
    const type = "attnconv-select";
    for (const data of [
      null, "attnconv-select", 7, [], {}, { type: "other", layer: 0, head: 1 }, { type, head: 1 }, { type, layer: 2, head: 0 },
      { type, layer: 0, head: 3 }, { type, layer: 0, query: [8, 0] }, { type, layer: 0, query: [0, -1] }, { type, layer: 0, query: ["0", "0"] },
      { type, layer: "0", head: 1 }, { type, layer: 0, head: 1, script: "alert(1)" }, { type, image: 1 },
    ]) await post(page, data);
    // The page's own window and another frame are not its parent.
    await image.evaluate(() => postMessage({ type: "attnconv-select", layer: 0, head: 1, query: [0, 0] }, "*"));
    await page.evaluate(() => {
      const other = document.createElement("iframe");
      other.setAttribute("sandbox", "allow-scripts");
      other.srcdoc = `<script>parent.frames[0].postMessage({ type: "attnconv-select", layer: 0, head: 1, query: [0, 0] }, "*");
        parent.postMessage({ type: "attnconv-selection", selection: { layer: 1, head: 1, query: [1, 1], image: 0, time: 0, part: "both" } }, "*");
        parent.postMessage("sent", "*");<\/script>`;
      document.body.append(other);
    });
    await page.waitForFunction(() => globalThis.heard.includes("sent"));
    await page.waitForTimeout(300);
    assert.match(await image.getAttribute("aria-label"), AT(4, 4));
    assert.deepEqual(await page.evaluate(() => globalThis.state.told), START, "messages of another frame are ignored");
    assert.deepEqual(await page.evaluate(() => globalThis.heard.map((data) => data.type ?? data)), ["attnconv-selection", "sent"]);
    assert.deepEqual(seen, []);
    assert.equal(await frame.getByRole("alert").count(), 0);
    await close();
  },

  async "invalid messages from the page are ignored, and a closed widget receives nothing"(browser) {
    const { page, image, told, close } = await notebook(browser);
    await told(START);
    await image.evaluate(() => {
      const legal = { layer: 0, head: 0, query: [0, 0], image: 0, time: 0, part: "both" };
      for (const wrong of [{ layer: -1 }, { head: "0" }, { query: null }, { query: [0] }, { image: 0.5 }, { time: NaN }, { part: "x".repeat(50) }]) {
        parent.postMessage({ type: "attnconv-selection", selection: { ...legal, ...wrong } }, "*");
      }
      for (const wrong of [null, 3, { type: "attnconv-selection" }]) parent.postMessage(wrong, "*");
    });
    await page.waitForTimeout(200);
    assert.deepEqual(await page.evaluate(() => globalThis.state.told), START);
    await page.evaluate(() => globalThis.close());
    await image.focus();
    await page.keyboard.press("ArrowDown");
    await page.waitForFunction(() => globalThis.heard.at(-1)?.selection?.query[0] === 5);
    assert.deepEqual(await page.evaluate(() => globalThis.state.told), START);
    await close();
  },

  async "no selection is reported for a payload that the visitor opened"(browser) {
    const { frame, seen, told, close } = await notebook(browser);
    await told(START);
    await frame.getByLabel(/Open a payload/).setInputFiles({ name: "other.safetensors", mimeType: "", buffer: made({ layers: 1, side: 4 }) });
    await told(null);
    assert.deepEqual(seen, []);
    await close();
  },

  async "a page outside a srcdoc frame sends no messages"(browser) {
    const context = await browser.newContext();
    const page = await context.newPage();
    await page.setContent("<!doctype html><script>heard = []; onmessage = ({ data }) => heard.push(data);<\/script><iframe></iframe>");
    await page.evaluate((text) => (document.querySelector("iframe").src = URL.createObjectURL(new Blob([text], { type: "text/html" }))), html());
    await page.frameLocator("iframe").getByRole("button", { name: /Arrow keys move the query/ }).waitFor();
    await page.waitForTimeout(300);
    assert.deepEqual(await page.evaluate(() => globalThis.heard), []);
    await context.close();
  },
};
