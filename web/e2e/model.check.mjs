/** The model explorer in the browser. */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { PAGE, axeFindings, drop, exponentialsPerFrame } from "./browser.mjs";
import { button, file, image, query, settled, shown } from "./explorer.mjs";
import { made } from "./payloads.mjs";

const FIXTURES = new URL("../tests/fixtures/", import.meta.url);

/** Return the canvas of a layer's maps as a data URL. */
const pixels = (page, layer = 0) => page.locator(".maps canvas").nth(layer).evaluate((canvas) => canvas.toDataURL());

const [DARK, BRIGHT] = ["0,34,78", "254,232,56"];

/** Return the colours near a corner and in the middle of the maps of three heads. */
const colours = (page) =>
  page.locator(".maps canvas").evaluate((canvas) => {
    const { data, width } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const [side, top] = [(width - 16) / 3, 28];
    return [0, 1, 2].map((head) => {
      const at = (share) => 4 * (Math.round(top + share * side) * width + Math.round(head * (side + 8) + share * side));
      return [at(0.06), at(0.5)].map((place) => [...data.subarray(place, place + 3)].join());
    });
  });

/** Return a number of the formula. */
const number = async (page, id) => Number((await page.getByTestId(id).innerText()).replace("−", "-"));

/** Move the mouse over the first map; return the number of frames. */
async function moved(page) {
  const box = await page.locator(".map .stage").first().boundingBox();
  await page.evaluate(() => {
    globalThis.frames = 0;
    globalThis.noting = requestAnimationFrame(function note() {
      globalThis.frames += 1;
      globalThis.noting = requestAnimationFrame(note);
    });
  });
  for (let step = 0; step < 60; step++) {
    const [down, right] = [Math.abs(((step / 60) % 2) - 1), Math.abs(((step / 25) % 2) - 1)];
    await page.mouse.move(box.x + 1 + right * (box.width - 2), box.y + 1 + down * (box.height - 2));
  }
  return page.evaluate(() => (cancelAnimationFrame(globalThis.noting), globalThis.frames));
}

/** Serve the page with a payload; `answer` is called with the response to each image. `taken` lists the images. */
async function served(browser, payload, answer, view = "model") {
  const html = readFileSync(PAGE, "utf8").replace("<head>", '<head><meta name="attnconv-server" content="images">');
  const taken = [];
  const server = createServer((request, response) => {
    if (request.url === "/") return response.setHeader("content-type", "text/html").end(html);
    if (request.url === "/payload") return response.end(payload);
    const parts = [];
    request.on("data", (part) => parts.push(part)).on("end", () => {
      taken.push(Buffer.concat(parts).toString());
      answer(response);
    });
  });
  await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
  const context = await browser.newContext({ viewport: { width: 1440, height: 900 } });
  const page = await context.newPage();
  await page.goto(`http://127.0.0.1:${server.address().port}/#view=${view}`);
  return { page, taken, close: () => context.close().then(() => server.close()) };
}

export const checks = {
  async "opens without errors, requests or axe findings"(browser) {
    for (const colorScheme of ["light", "dark"]) {
      for (const bytes of [made({ layers: 2, side: 8, times: 3 }), readFileSync(new URL("payload.safetensors", FIXTURES))]) {
        const { page, seen, close } = await shown(browser, bytes, { colorScheme, hash: "&model.zoomed=true" });
        assert.deepEqual(await axeFindings(page), []);
        assert.deepEqual(seen, []);
        await close();
      }
    }
  },

  async "a frame takes less time than two million exponentials while the query moves"(browser) {
    for (const options of [{ side: 32 }, { side: 32, kind: "content" }, { side: 64 }]) {
      const { page, seen, close } = await shown(browser, made(options), { viewport: { width: 1280, height: 1000 } });
      await moved(page);
      const each = await exponentialsPerFrame(page, () => moved(page));
      assert.ok(each < 2, `${JSON.stringify(options)}: ${each} million exponentials`);
      assert.deepEqual(seen, []);
      await close();
    }
  },

  async "the page's numbers equal the library's, for all kinds of layers"(browser) {
    const bytes = readFileSync(new URL("payload.safetensors", FIXTURES));
    const { rows } = JSON.parse(readFileSync(new URL("payload.json", FIXTURES), "utf8"));
    assert.equal(new Set(rows.map(({ place }) => place.layer)).size, 5);
    for (const { place, part, row } of rows) {
      const { layer, head, image: picture, time } = place;
      const link = { layer, head, image: picture, time, part, query: `${Math.floor(place.query / 4)},${place.query % 4}`, key: "2,1", zoomed: true };
      const hash = Object.entries(link).map(([name, value]) => `&model.${name}=${value}`).join("");
      const { page, close } = await shown(browser, bytes, { hash });
      assert.ok(Math.abs((await number(page, "probability")) - row[9]) < 1e-6, JSON.stringify([place, part]));
      const caption = page.locator(".maps").nth(layer).locator(".map .soft").nth(head);
      await caption.scrollIntoViewIfNeeded();
      await caption.filter({ hasText: /\d/ }).waitFor();
      const largest = Number((await caption.innerText()).replace(/max |%/g, "")) / 100;
      assert.ok(Math.abs(largest / Math.max(...row) - 1) < 0.06, "two digits above the map"); // 1.05 is rounded to 1.1
      await close();
    }
  },

  async "numbers of the formula have at most six significant digits"(browser) {
    for (const kind of ["positions", "content", "rows"]) {
      const { page, close } = await shown(browser, made({ kind, layers: 1, heads: 3, side: 8 }), { hash: "&model.zoomed=true" });
      const zoom = page.getByRole("region", { name: /^layer 0, head 0/ });
      if (kind === "content") await zoom.getByText(/Show the \d+ products/).click();
      const numbers = (await zoom.innerText()).match(/\d+(?:\.\d+)?/g);
      assert.ok(numbers.length > 8, String(numbers));
      assert.deepEqual(numbers.filter((found) => found.replace(".", "").replace(/^0+/, "").length > 6), [], kind);
      await close();
    }
  },

  async "the query follows the pointer over maps and image, a click locks it, Escape unlocks it"(browser) {
    const { page, seen, close } = await shown(browser, made({ layers: 2, side: 16 }));
    const box = await page.locator(".map .stage").nth(4).boundingBox();
    const at = (row, column) => [box.x + ((column + 0.5) / 16) * box.width, box.y + ((row + 0.5) / 16) * box.height];
    const before = await pixels(page);
    await page.mouse.move(...at(3, 12));
    await settled(page);
    assert.deepEqual(await query(page), [3, 12]);
    assert.notEqual(await pixels(page), before);
    await page.mouse.click(...at(3, 12));
    await page.mouse.move(...at(9, 1));
    assert.deepEqual(await query(page), [3, 12]);
    await page.keyboard.press("Escape");
    await page.mouse.move(...at(9, 2));
    assert.deepEqual(await query(page), [9, 2]);
    const picture = await image(page).boundingBox();
    await page.mouse.move(picture.x + picture.width * 0.99, picture.y + picture.height * 0.01);
    assert.deepEqual(await query(page), [0, 15]);
    assert.deepEqual(seen, []);
    await close();
  },

  async "uniform heads are dark and sharp heads bright, with one scale for all maps"(browser) {
    const { page, seen, close } = await shown(browser, made({ kind: "rows", layers: 1, heads: 3, side: 8 }), { hash: "&model.centres=false&model.most=false&model.query=7,7" });
    await page.mouse.move(0, 0);
    assert.deepEqual(await colours(page), [[BRIGHT, DARK], [DARK, DARK], [DARK, DARK]]);
    const legend = page.locator("figure").filter({ hasText: "times uniform" });
    assert.equal(await legend.count(), 1);
    assert.deepEqual(await legend.locator(".marks span").allInnerTexts(), ["1×", "4×", "16×", "64×"]);
    assert.deepEqual(seen, []);
    await close();
  },

  async "a head is highlighted in its plane, map and table row, in its own colour, and its value is shown"(browser) {
    const { page, seen, close } = await shown(browser, made({ layers: 2, heads: 4, side: 8, times: 3 }), { viewport: { width: 1280, height: 1600 } });
    const colour = (locator, property) => locator.evaluate((node, property) => getComputedStyle(node)[property], property);
    const map = page.locator(".strip").nth(1).locator(".map").nth(2);
    const spot = page.locator(".strip").nth(1).locator(`.plane [data-head="2"]`).last();
    const row = page.getByRole("region", { name: /Head statistics/ }).locator("tbody tr").nth(6);
    const colours = [await colour(map.locator(".stage"), "outlineColor"), await colour(spot, "color"), await colour(row.locator(".dot"), "backgroundColor")];
    assert.equal(new Set(colours).size, 1, colours.join(" "));
    const marked = async () => [
      await page.locator(".map.active").count(),
      await map.evaluate((node) => node.classList.contains("active")),
      await spot.evaluate((node) => node.classList.contains("chosen")),
      await row.evaluate((node) => node.classList.contains("active")),
    ];
    const heights = new Set();
    for (const place of [map.locator(".stage"), spot.locator(".dot"), row]) {
      await page.mouse.move(0, 0);
      assert.deepEqual(await marked(), [0, false, false, false]);
      await place.hover({ force: true });
      assert.deepEqual(await marked(), [1, true, true, true]);
      heights.add(await page.evaluate(() => document.documentElement.scrollHeight));
      await page.locator("figcaption .laid").filter({ hasText: "layer 1, head 2: bright where it attends" }).waitFor();
    }
    await page.mouse.move(0, 0);
    heights.add(await page.evaluate(() => document.documentElement.scrollHeight));
    assert.equal(heights.size, 1, "nothing moves");
    await map.locator(".stage").hover({ position: { x: 5, y: 5 } });
    const words = await page.locator(".readout").innerText();
    const [, probability, times] = /^layer 1, head 2 · row 0, column 0 · probability ([\d.]+) = ([\d.]+) × uniform$/.exec(words);
    assert.ok(Math.abs(64 * probability - times) < 0.01 * times, words);
    assert.ok((await page.locator(".strip").nth(1).locator(".trail").count()) === 4, "trails over training");
    assert.deepEqual(seen, []);
    await close();
  },

  async "a map is enlarged by a double click or its button without losing the reader's place"(browser) {
    const { page, seen, close } = await shown(browser, made({ layers: 6, side: 8 }), { viewport: { width: 1280, height: 1000 }, reducedMotion: "reduce" });
    const maps = (layer) => page.locator(".strip").nth(layer).locator(".map");
    const stage = maps(0).nth(5).locator(".stage");
    const still = await stage.boundingBox();
    await stage.dblclick({ position: { x: 20, y: 30 } });
    await page.getByRole("heading", { name: /^layer 0, head 5/ }).waitFor();
    assert.deepEqual(await stage.boundingBox(), still, "nothing moves if there is room below the layer");
    const [locked, place] = [await button(page, /^Lock$/).getAttribute("aria-pressed"), await query(page)];
    assert.equal(locked, "true", "the query of the double click is kept");
    await stage.hover({ position: { x: 60, y: 60 } });
    assert.deepEqual(await query(page), place);
    await page.keyboard.press("Escape");
    await stage.dblclick({ position: { x: 60, y: 60 } });
    await page.getByRole("heading", { name: /^layer 0, head 5/ }).waitFor();
    assert.deepEqual(await query(page), place, "a locked query is kept");
    await page.keyboard.press("Escape");
    await page.keyboard.press("Escape");
    await maps(2).first().scrollIntoViewIfNeeded();
    await page.evaluate(() => scrollBy(0, 150));
    const top = async (layer) => (await maps(layer).nth(3).boundingBox()).y;
    const before = await top(2);
    await maps(2).nth(3).locator(".stage").dblclick();
    await page.getByRole("heading", { name: /^layer 2, head 3/ }).waitFor();
    const box = await page.locator(".zoom").boundingBox();
    assert.ok(box.y > (await top(2)) && box.y + 250 < 900, "the enlarged head is in view, below its layer");
    assert.ok((await top(2)) > 0, `its map is still in view, moved by ${before - (await top(2))} px`);
    const enlarge = button(page, /^layer 3, head 3: enlarge$/);
    await enlarge.focus();
    const there = await top(3);
    await page.keyboard.press("Enter");
    await page.getByRole("heading", { name: /^layer 3, head 3/ }).waitFor();
    const { y } = await enlarge.boundingBox();
    assert.ok(y >= 0 && y <= there + 2, "its map is still in view, and has moved only to show the enlarged head");
    assert.equal(await enlarge.evaluate((node) => node === document.activeElement), true);
    const open = await top(3);
    await page.keyboard.press("Escape");
    await page.locator(".zoom").waitFor({ state: "detached" });
    assert.equal(await enlarge.evaluate((node) => node === document.activeElement), true);
    assert.ok(Math.abs((await top(3)) - open) < 2, "the maps stay where they are");
    const row = button(page, "layer 5, head 1: enlarge from the table");
    await row.click();
    await page.getByRole("heading", { name: /^layer 5, head 1/ }).waitFor();
    assert.ok((await page.locator(".zoom").boundingBox()).y < 100);
    await button(page, "Close").click();
    assert.equal(await row.evaluate((node) => node === document.activeElement), true);
    assert.deepEqual(seen, []);
    await close();
  },

  async "images are chosen by thumbnails with labels and predictions"(browser) {
    const bytes = made({ kind: "rows", layers: 1, heads: 3, side: 8, images: 3, known: true });
    const { page, seen, close } = await shown(browser, bytes);
    const tiles = page.getByRole("group", { name: "Images" }).getByRole("button");
    assert.deepEqual((await tiles.allInnerTexts()).map((text) => text.replace(/\s+/g, " ").trim()),
      ["frog ✓ right", "ship ✗ wrong, predicted truck", "waves 2", "mean over all 3"]);
    await page.getByText("✓ Right. Label: frog. Predicted: frog 75%, cat 12.5%, ship 6.3%.").waitFor();
    await tiles.nth(1).click();
    await page.getByText("✗ Wrong. Label: ship. Predicted: truck 50%, ship 40%, frog 5%.").waitFor();
    await page.waitForFunction(() => /model.image=1/.test(location.hash));
    assert.equal(await tiles.nth(1).getAttribute("aria-pressed"), "true");
    assert.deepEqual(await axeFindings(page), []);
    assert.deepEqual(seen, []);
    await close();
  },

  async "random weights are said to be random, trained ones are not"(browser) {
    for (const random of [true, false]) {
      const { page, close } = await shown(browser, made({ layers: 1, side: 8, random }));
      assert.equal(await page.getByText("random weights: not trained").count(), Number(random));
      await close();
    }
  },

  async "modules whose attention could not be read are listed with the reason"(browser) {
    const { page, seen, close } = await shown(browser, made({ layers: 1, side: 8, leftOut: { "blocks.1.attn": "its queries are pooled" } }));
    await page.getByText("1 module is not shown, because attention could not be read").click();
    await page.getByText("blocks.1.attn: its queries are pooled").waitFor();
    assert.deepEqual(await axeFindings(page), []);
    assert.deepEqual(seen, []);
    await close();
  },

  async "a class token can be the query"(browser) {
    const { page, seen, close } = await shown(browser, made({ kind: "rows", layers: 1, heads: 3, side: 8, images: 3 }));
    await button(page, "class token").click();
    await button(page, /^layer 0, head 0: enlarge$/).click();
    assert.equal(await number(page, "probability"), 1);
    await page.getByText("25% of this query's attention is on the class token").waitFor();
    await page.waitForFunction(() => /Query: class token. layer 0, head 0 attends to row 0, column 0/.test(document.querySelector("[aria-live]").textContent));
    assert.deepEqual(await axeFindings(page), []);
    assert.deepEqual(seen, []);
    await close();
  },

  async "a head is switched off or replaced with the nearest convolution, one at a time"(browser) {
    const bytes = made({ layers: 2, heads: 3, side: 8, images: 2, known: true });
    const { page, seen, close } = await shown(browser, bytes);
    const status = page.locator(".zoom [role=status]");
    await button(page, /^layer 0, head 1: enlarge$/).click();
    assert.equal(await button(page, "as trained").getAttribute("aria-pressed"), "true");
    await button(page, "switched off").click();
    await status.getByText("Layer 0, head 1 switched off: the logits change by 45.5%. Predicted: cat 50%, frog 25%, ship 12.5%. As trained: frog 75%, cat 12.5%, ship 6.3%.").waitFor();
    await button(page, /^layer 1, head 2: enlarge$/).click();
    assert.equal(await button(page, "as trained").getAttribute("aria-pressed"), "true", "another head");
    await button(page, "nearest convolution").click();
    await status.getByText("Layer 1, head 2 replaced with the nearest convolution: the logits change by").waitFor();
    assert.match(await status.innerText(), /Predicted: frog 62.5%/);
    await page.waitForFunction(() => /model.changed=1.2.convolution/.test(location.hash));
    assert.deepEqual(await axeFindings(page), []);
    await button(page, "as trained").click();
    await status.getByText("Change the head to see").waitFor();
    assert.deepEqual(seen, []);
    await close();
    const other = await shown(browser, bytes, { hash: "&model.zoomed=true&model.image=1&model.changed=0.0.zero" });
    await other.page.getByText("Layer 0, head 0 switched off: the logits change by").waitFor();
    await other.page.getByText("As trained: truck 50%").waitFor();
    await other.close();
  },

  async "the maps are sorted by the column of the table"(browser) {
    const { page, seen, close } = await shown(browser, made({ layers: 1, side: 8 }));
    const order = async () => (await page.locator(".strip .map .title span:nth-child(2)").allInnerTexts()).map((text) => text.replace("head ", ""));
    assert.deepEqual(await order(), [..."012345678"]);
    const before = await pixels(page);
    const table = page.getByRole("region", { name: /Head statistics/ });
    await table.getByRole("button", { name: /^entropy/ }).click();
    const rows = await table.locator("tbody td:nth-child(2) button").allInnerTexts();
    assert.deepEqual(await order(), rows);
    await settled(page);
    assert.notEqual(await pixels(page), before);
    await button(page, "Model's order").click();
    assert.deepEqual(await order(), [..."012345678"]);
    assert.deepEqual(seen, []);
    await close();
  },

  async "can be operated by keyboard only"(browser) {
    const { page, seen, close } = await shown(browser, made({ layers: 2, heads: 3, side: 16, times: 3, kind: "positions" }));
    const reached = new Set();
    await page.locator("h2").focus();
    for (let press = 0; press < 60; press++) {
      await page.keyboard.press("Tab");
      const name = await page.evaluate(() => {
        const at = document.activeElement;
        if (at === null || at === document.body) return "";
        return at.getAttribute("aria-label") ?? at.closest("label")?.innerText ?? at.textContent ?? "";
      });
      if (name === "") break;
      reached.add(name.split("\n")[0].trim().slice(0, 40));
    }
    const names = [...reached].join("|");
    for (const part of ["query at row", "Query, row", "Query, column", "Lock", "Snapshot", "Play", "softmax", "centres",
      "50%", "90%", "Skip the maps", "layer 0, head 0: enlarge", "layer 1, head 2: enlarge", "entropy", "Open a payload", "Compare"]) {
      assert.ok(names.includes(part), `${part} is not among ${names}`);
    }
    await image(page).focus();
    for (const key of ["ArrowDown", "ArrowRight", "Shift+ArrowLeft", "Enter"]) await page.keyboard.press(key);
    assert.deepEqual(await query(page), [9, 4]);
    assert.equal(await page.getByRole("button", { name: "Lock", exact: true }).getAttribute("aria-pressed"), "true");
    await page.waitForFunction(() => /row 9, column 4. layer 0, head 0 attends to/.test(document.querySelector("[aria-live]").textContent));
    await button(page, "layer 1, head 1: enlarge").first().focus();
    await page.keyboard.press("ArrowUp");
    assert.deepEqual(await query(page), [8, 4]);
    await page.keyboard.press("Enter");
    await page.getByRole("heading", { name: /^layer 1, head 1/ }).waitFor();
    assert.equal(await page.evaluate(() => document.activeElement.getAttribute("aria-label")), "layer 1, head 1: enlarge");
    const map = button(page, /^Map of head 1/);
    await map.focus();
    const first = await number(page, "probability");
    await page.keyboard.press("ArrowLeft");
    assert.ok((await number(page, "probability")) < first);
    await page.keyboard.press("Escape"); // closes the enlarged head
    await map.waitFor({ state: "detached" });
    assert.equal(await page.evaluate(() => document.activeElement.getAttribute("aria-label")), "layer 1, head 1: enlarge");
    await page.keyboard.press("Escape"); // unlocks the query
    assert.equal(await page.getByRole("button", { name: "Lock", exact: true }).getAttribute("aria-pressed"), "false");
    assert.deepEqual(seen, []);
    await close();
  },

  async "touch moves and locks the query, and targets are at least 24 px"(browser) {
    const phone = { viewport: { width: 390, height: 800 }, hasTouch: true, isMobile: true };
    const { page, seen, close } = await shown(browser, made({ layers: 2, side: 16, times: 2 }), { ...phone, hash: "&model.zoomed=true" });
    const map = page.locator(".map .stage").nth(1);
    await map.scrollIntoViewIfNeeded();
    const box = await map.boundingBox();
    await page.touchscreen.tap(box.x + 0.1 * box.width, box.y + 0.9 * box.height);
    assert.deepEqual(await query(page), [14, 1]);
    assert.equal(await page.getByRole("button", { name: "Lock", exact: true }).getAttribute("aria-pressed"), "true");
    await page.getByText("Display options").tap();
    const small = await page.evaluate(() =>
      [...document.querySelectorAll("button, select, input, summary")]
        .map((target) => ({ box: target.getBoundingClientRect(), words: target.outerHTML.slice(0, 120) }))
        .filter(({ box }) => box.width < 24 || box.height < 24)
        .map(({ box, words }) => `${box.width} x ${box.height}: ${words}`),
    );
    assert.deepEqual(small, []);
    assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), "scrolls sideways");
    const table = page.getByRole("region", { name: /Head statistics/ });
    assert.ok(await table.evaluate((box) => box.scrollWidth > box.clientWidth), "the table scrolls inside its box");
    assert.deepEqual(seen, []);
    await close();
  },

  async "a link restores the view"(browser) {
    const bytes = made({ layers: 2, side: 16, times: 4 });
    const { page, close } = await shown(browser, bytes);
    await page.getByRole("spinbutton", { name: "Query, row" }).fill("3");
    await page.getByRole("checkbox", { name: "softmax" }).uncheck();
    await page.getByRole("checkbox", { name: "50%" }).check();
    await page.getByRole("slider", { name: /Snapshot/ }).fill("1");
    await page.getByRole("slider", { name: /Snapshot/ }).fill("3"); // the only snapshot with a known score
    await button(page, "layer 1, head 4: enlarge").first().click();
    const header = (tab, table, name) => tab.getByRole("region", { name: table }).getByRole("columnheader", { name });
    await header(page, /Head statistics/, /^entropy/).getByRole("button").click();
    for (let press = 0; press < 2; press++) await header(page, /Layer statistics/, /^score/).getByRole("button").click();
    await page.waitForFunction(() => location.hash.includes("model.layerDown=false")); // the last change
    await page.mouse.move(0, 0);
    await page.evaluate(() => scrollTo(0, 0));
    for (let frames = 0; frames < 3; frames++) await settled(page); // maps are painted when they are in view
    const [hash, drawn, share] = [new URL(page.url()).hash, await pixels(page), await number(page, "probability")];
    await close();
    const again = await shown(browser, bytes, { hash: hash.replace("#view=model", "") });
    for (let frames = 0; frames < 3; frames++) await settled(again.page);
    assert.equal(await number(again.page, "probability"), share);
    assert.equal(await pixels(again.page), drawn);
    assert.deepEqual(await query(again.page), [3, 8]);
    assert.equal(await header(again.page, /Head statistics/, /^entropy/).getAttribute("aria-sort"), "descending");
    assert.equal(await header(again.page, /Layer statistics/, /^score/).getAttribute("aria-sort"), "ascending");
    await again.page.getByRole("heading", { name: /^layer 1 convolution score 0.80/ }).waitFor();
    await again.close();
  },

  async "statistics can be sorted by any column, and a click on a row enlarges its head"(browser) {
    const { page, close } = await shown(browser, made({ layers: 2, side: 8 }));
    const table = page.getByRole("region", { name: /Head statistics/ });
    const column = () => table.locator("tbody td:nth-child(3)").allInnerTexts();
    const header = table.getByRole("columnheader", { name: /^entropy/ });
    await header.getByRole("button").click();
    assert.equal(await header.getAttribute("aria-sort"), "descending");
    const down = (await column()).filter((text) => text !== "–").map(Number);
    assert.deepEqual(down, [...down].sort((one, other) => other - one));
    assert.deepEqual((await column()).slice(-2), ["–", "–"]);
    await header.getByRole("button").click();
    assert.equal(await header.getAttribute("aria-sort"), "ascending");
    assert.equal(Number((await column())[0]), Math.min(...down));
    assert.match(await header.getByRole("button").getAttribute("title"), /in nats/);
    await page.getByText("Column descriptions").first().click();
    await page.getByRole("definition").filter({ hasText: "in nats" }).first().waitFor();
    await table.getByRole("row").nth(1).getByRole("cell").last().click();
    const named = await table.getByRole("row").nth(1).getByRole("button").innerText();
    await page.getByRole("heading", { name: new RegExp(`, head ${named}\\b.*9 heads`) }).waitFor();
    await close();
  },

  async "training snapshots play as an animation, except with reduced motion"(browser) {
    const bytes = made({ layers: 1, side: 16, times: 4, scores: [0.1, 0.2, null, 0.4] });
    const { page, close } = await shown(browser, bytes, { hash: "&model.time=0" });
    const slider = page.getByRole("slider", { name: /Snapshot/ });
    const heading = page.locator(".strip h3").first();
    assert.match(await heading.innerText(), /convolution score 0\.10/, "of the epoch shown");
    const before = await pixels(page);
    await page.evaluate(() => {
      globalThis.film = { times: new Set(), places: new Set() };
      requestAnimationFrame(function note() {
        globalThis.film.times.add(document.querySelector("input[aria-valuetext^=epoch]").getAttribute("aria-valuetext"));
        globalThis.film.places.add(document.querySelector(".plane .dot").getAttribute("cx"));
        requestAnimationFrame(note);
      });
    });
    const start = Date.now();
    await button(page, "Play").click();
    await button(page, "Pause").waitFor({ state: "detached" });
    assert.ok(Date.now() - start > 4500, `${Date.now() - start} ms`);
    const film = await page.evaluate(() => ({ times: [...globalThis.film.times], places: globalThis.film.places.size }));
    assert.ok(film.times.some((name) => /^epoch \d\.[1-9]$/.test(name)), "shows times between the snapshots");
    assert.ok(film.places > 10, `heads were seen at ${film.places} places`);
    assert.equal(await slider.inputValue(), "3");
    await settled(page);
    assert.notEqual(await pixels(page), before);
    assert.match(await heading.innerText(), /convolution score 0\.40/);
    await button(page, "Previous snapshot").click();
    assert.equal(await slider.getAttribute("aria-valuetext"), "epoch 2");
    assert.doesNotMatch(await heading.innerText(), /convolution score/, "it is unknown for this epoch");
    await close();
    const still = await shown(browser, bytes, { reducedMotion: "reduce" });
    assert.equal(await button(still.page, "Play").count(), 0);
    assert.equal(await button(still.page, "Next snapshot").count(), 1);
    await still.close();
  },

  async "approximate scores have a warning above the maps and the enlarged map"(browser) {
    const warnings = async (rounding) => {
      const bytes = made({ layers: 2, side: 8, kind: "content", also: { layer: { "rounding of scores": rounding } } });
      const { page, seen, close } = await shown(browser, bytes, { hash: "&model.zoomed=true" });
      const texts = await page.getByText(/approximate: errors are up to 0.02 nats/).count();
      assert.equal(await page.locator(".zoom").getByText(/are approximate/).count(), texts > 0 ? 1 : 0);
      assert.deepEqual(await axeFindings(page), []);
      assert.deepEqual(seen, []);
      await close();
      return texts;
    };
    assert.equal(await warnings(0.02), 3);
    assert.equal(await warnings(0.009), 0);
  },

  async "statistics may have any name, and when a view fails the others still work"(browser) {
    const also = JSON.parse(
      '{"heads": {"layer": [1, 3], "head": [2, 1], "constructor": [3, 4], "__proto__": [5, 6]}, "layer": {"layer": 3, "toString": 2, "__proto__": 1}}',
    );
    const { page, seen, close } = await shown(browser, made({ layers: 2, heads: 2, side: 8, also }));
    const table = page.getByRole("region", { name: /Head statistics/ });
    const firsts = async () => (await table.locator("tbody td:nth-child(2)").allInnerTexts()).join("");
    await table.getByRole("button", { name: "layer", exact: true }).nth(1).click();
    assert.equal((await firsts()).replace(/\s/g, ""), "1100");
    // In one frame, so that the view is destroyed before the frame is painted.
    await page.evaluate(async () => {
      const press = (name) => [...document.querySelectorAll("button")].find((one) => one.textContent.trim() === name).click();
      press("layer");
      await null;
      press("Article");
    });
    await page.locator("article, .found, h2").first().waitFor();
    await button(page, /^Model explorer$/).click();
    await table.waitFor();
    assert.deepEqual(seen, []);
    await page.evaluate(() => {
      const paint = CanvasRenderingContext2D.prototype.createImageData;
      CanvasRenderingContext2D.prototype.createImageData = () => {
        throw new Error("no pixels today");
      };
      globalThis.repair = () => (CanvasRenderingContext2D.prototype.createImageData = paint);
    });
    await button(page, "Theorem workbench").click();
    const alert = page.getByRole("alert").filter({ hasText: "This view failed: no pixels today." });
    await alert.waitFor();
    assert.deepEqual(await axeFindings(page), []);
    await page.evaluate(() => globalThis.repair());
    await button(page, /^Model explorer$/).click();
    await table.waitFor();
    await page.evaluate(() => (CanvasRenderingContext2D.prototype.createImageData = null));
    await button(page, "Theorem workbench").click();
    await page.getByRole("alert").waitFor();
    await page.evaluate(() => globalThis.repair());
    await button(page, "Try again").click();
    await page.getByRole("heading", { level: 2, name: "Theorem workbench" }).waitFor();
    assert.equal(await page.getByRole("alert").count(), 0);
    await close();
  },

  async "two models can be compared, and an invalid second payload is rejected with a message"(browser) {
    const { page, seen, close } = await shown(browser, made({ layers: 2, side: 8 }));
    const compare = page.getByLabel(/Compare with a second payload/);
    await compare.setInputFiles(file(Buffer.from("these are notes")));
    await page.getByRole("alert").filter({ hasText: "must be a complete safetensors file" }).waitFor();
    await compare.setInputFiles(file(made({ layers: 3, side: 16, title: "Other", kind: "content" })));
    await page.getByText("B: Other").first().waitFor();
    assert.equal(await page.getByRole("alert").count(), 0);
    const titles = (await page.locator(".shows .strip h3").allInnerTexts()).map((text) => /layer \d (A|B) · (Waves|Other)/.exec(text.replace(/\s+/g, " "))[0]);
    assert.deepEqual(titles, ["layer 0 A · Waves", "layer 0 B · Other", "layer 1 A · Waves", "layer 1 B · Other", "layer 2 B · Other"]);
    await button(page, /^A, Waves: waves, query at row 4/).waitFor();
    await button(page, /^B, Other: waves, query at row 9/).waitFor();
    await button(page, "B, layer 2, head 4: enlarge").click();
    await page.getByRole("heading", { name: /^B, layer 2, head 4/ }).waitFor();
    await page.waitForFunction(() => /model.other=true/.test(location.hash));
    const strip = await page.locator(".strip").nth(4).boundingBox();
    assert.ok((await page.locator(".zoom").boundingBox()).y > strip.y, "below its own layer");
    assert.deepEqual(await axeFindings(page), []);
    await button(page, "Close B").click();
    assert.equal(await page.locator(".strip").count(), 2);
    assert.deepEqual(seen, []);
    await close();
  },

  async "the visitor's image is sent to the page's server, and its error messages are shown"(browser) {
    const before = made({ layers: 1, side: 8, title: "Before" });
    const { page, taken, close } = await served(browser, before, (response) => {
      if (taken.length === 1) response.writeHead(415, { "content-type": "application/json" }).end('{"error": "No picture, said the server."}');
      else setTimeout(() => response.end(made({ layers: 1, side: 8, title: "After", picture: [48, 48] })), 500);
    });
    await page.locator("header").getByText("Before").waitFor();
    const field = page.getByLabel(/Run the model on/);
    await field.setInputFiles(file(Buffer.from("pixels"), "mine.png"));
    await page.getByRole("alert").filter({ hasText: "No picture, said the server." }).waitFor();
    const tiles = page.locator('[aria-label="Images"] button');
    const count = await tiles.count();
    await field.setInputFiles(file(Buffer.from("pixels"), "mine.png"));
    await page.getByText(/Running the model on the image, \d s/).waitFor();
    await page.waitForFunction(() => document.querySelectorAll('[aria-label="Images"] button').length === 2);
    assert.equal(await page.getByRole("alert").count(), 0);
    assert.equal(await tiles.count(), count + 1, "the examples stay");
    assert.deepEqual(await tiles.evaluateAll((found) => found.map((tile) => tile.getAttribute("aria-pressed"))), ["false", "true"]);
    assert.equal(await page.locator(".stage canvas").first().evaluate((canvas) => canvas.width), 48, "the picture is the server's");
    await page.getByText("The thumbnail shows the crop that the model sees").waitFor();
    await tiles.first().click();
    assert.equal(await page.locator(".stage canvas").first().evaluate((canvas) => canvas.width), 64);
    assert.deepEqual(taken, ["pixels", "pixels"]);
    await close();
  },

  async "the field for the visitor's image is in view, and so is the progress wherever the page is scrolled to"(browser) {
    const examples = made({ layers: 12, heads: 12, side: 8, images: 12 });
    for (const view of ["model", "article&article.step=7"]) {
      for (const end of ["top", "bottom"]) {
        let ask;
        const asked = new Promise((done) => (ask = done));
        const { page, close } = await served(browser, examples, ask, view);
        await page.locator("header").getByText("Waves").waitFor();
        if (view === "model") {
          const field = page.getByLabel(/Run the model on/).locator("xpath=ancestor::label");
          const { y, height } = await field.boundingBox();
          assert.ok(y + height < 900, `the field ends at ${y + height} px`);
        }
        await page.evaluate((end) => scrollTo(0, end === "top" ? 0 : document.documentElement.scrollHeight), end);
        await drop(page, "mine.png", "image/png", "pixels");
        await page.waitForFunction(() =>
          [...document.querySelectorAll("[role=status]")].some((status) => {
            const { top, bottom } = status.getBoundingClientRect();
            return /Running the model on the image/.test(status.textContent) && top >= 0 && bottom <= innerHeight;
          }),
        ).catch((error) => {
          throw new Error(`no progress in view in ${view}, scrolled to the ${end}`, { cause: error });
        });
        (await asked).end(made({ layers: 1, side: 8 }));
        await page.getByText(/Running the model on the image/).first().waitFor({ state: "detached" });
        await close();
      }
    }
  },

  async "screenshots at the widths of a phone and a projector"(browser, shots) {
    for (const [name, width, colorScheme] of [["phone", 390, "light"], ["projector", 1920, "light"], ["dark", 1280, "dark"]]) {
      for (const kind of ["positions", "content"]) {
        const options = { viewport: { width, height: 1800 }, colorScheme, reducedMotion: "reduce", hash: "&model.zoomed=true&model.half=true" };
        const { page, close } = await shown(browser, made({ layers: 3, side: 16, times: 3, kind }), options);
        await page.screenshot({ path: `${shots}/model-${kind}-${name}.png`, fullPage: true });
        await close();
      }
    }
  },
};
