import { svelte } from "@sveltejs/vite-plugin-svelte";
import { viteSingleFile } from "vite-plugin-singlefile";
import { defineConfig } from "vitest/config";

// The build names the repository, and a picture in it for previews of links, if its environment does.
const { GITHUB_SERVER_URL: server, GITHUB_REPOSITORY: repository } = process.env;
const code = server && repository ? `${server}/${repository}` : "";
const preview = code && { tag: "meta", attrs: { property: "og:image", content: `${code}/raw/HEAD/docs/images/opening.png` } };

// A single file that opens from disk: an ordinary build loads its modules by URL, which file:// does not allow.
export default defineConfig({
  plugins: [
    svelte(),
    viteSingleFile({ removeViteModuleLoader: true }),
    { name: "preview", transformIndexHtml: () => (preview ? [preview] : []) },
  ],
  define: { "import.meta.env.VITE_REPOSITORY": JSON.stringify(code) },
  build: { target: "es2022", modulePreload: false },
  test: { include: ["tests/**/*.test.ts"], environment: "node", setupFiles: ["tests/pictures.ts"] },
});
