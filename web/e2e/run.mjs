/** Run the `*.check.mjs` files of this folder in one browser: `npm run e2e [name ...]`. */
import { mkdirSync, readdirSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { browserPath, launched } from "./browser.mjs";

const folder = fileURLToPath(new URL(".", import.meta.url));
const shots = `${folder}shots`;
const wanted = process.argv.slice(2);
const path = browserPath();
if (path === null) {
  console.log("e2e: skipped, Chromium was not found. Install chromium, or set CHROMIUM to its path.");
  process.exit(0);
}
mkdirSync(shots, { recursive: true });
const browser = await launched(path);
let failed = 0;
for (const file of readdirSync(folder).filter((name) => name.endsWith(".check.mjs")).sort()) {
  if (wanted.length > 0 && !wanted.some((name) => file.startsWith(name))) continue;
  const { checks } = await import(`./${file}`);
  for (const [name, check] of Object.entries(checks)) {
    const start = performance.now();
    try {
      await check(browser, shots);
      console.log(`ok    ${file} ${name} (${Math.round(performance.now() - start)} ms)`);
    } catch (error) {
      failed += 1;
      console.log(`FAIL  ${file} ${name}\n${error instanceof Error ? error.stack : error}`);
    }
  }
}
await browser.close();
process.exit(failed ? 1 : 0);
