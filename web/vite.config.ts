import { svelte } from "@sveltejs/vite-plugin-svelte";
import { viteSingleFile } from "vite-plugin-singlefile";
import { defineConfig } from "vitest/config";

// A single file that opens from disk: an ordinary build loads its modules by URL, which file:// does not allow.
export default defineConfig({
  plugins: [svelte(), viteSingleFile({ removeViteModuleLoader: true })],
  build: { target: "es2022", modulePreload: false },
  test: { include: ["tests/**/*.test.ts"], environment: "node", setupFiles: ["tests/pictures.ts"] },
});
