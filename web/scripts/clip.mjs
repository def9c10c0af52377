/**
 * Screenshots of the opening for the README's clip and for previews of links, from the built page:
 *
 *     node web/scripts/clip.mjs FOLDER && python web/scripts/clip.py FOLDER docs/images
 */
import { mkdirSync, writeFileSync } from "node:fs";
import { browserPath, launched, opened } from "../e2e/browser.mjs";

const FRAMES = 60;
const folder = process.argv[2];
mkdirSync(folder, { recursive: true });
const browser = await launched(browserPath());
const at = (progress) => ({ hash: `#view=article&article.playing=false&article.progress=${progress}` });

const clip = await opened(browser, { ...at(0), viewport: { width: 930, height: 700 } });
await clip.page.addStyleTag({ content: ".heads figcaption, header, .by, .controls, .ways { display: none !important } .opening { padding: 0 0.75rem 0.75rem }" });
const box = await clip.page.locator(".opening").boundingBox();
for (let frame = 0; frame < FRAMES; frame++) {
  await clip.page.getByRole("slider", { includeHidden: true }).evaluate((slider, value) => {
    slider.value = value;
    slider.dispatchEvent(new Event("input", { bubbles: true }));
  }, String(frame / (FRAMES - 1)));
  await clip.page.screenshot({ path: `${folder}/frame-${String(frame).padStart(3, "0")}.png`, clip: box });
}
// The clip's palette must contain the colours of the heads.
const colours = await clip.page.locator(".lens [data-head]").evaluateAll((heads) => heads.map((head) => getComputedStyle(head).color));
writeFileSync(`${folder}/colours.json`, JSON.stringify([...new Set(colours)].map((colour) => colour.match(/\d+/g).map(Number))));
await clip.close();

const preview = await opened(browser, { ...at(0.6), viewport: { width: 1200, height: 630 } });
await preview.page.addStyleTag({ content: "header, .controls, .ways { display: none !important } .opening { padding: 0.5rem 2rem } h2 { font-size: 2.2rem !important } .row { max-width: none !important }" });
await preview.page.screenshot({ path: `${folder}/opening.png` });
await preview.close();
await browser.close();
