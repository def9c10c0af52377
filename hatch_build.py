"""Build hook: the explorer's page, one HTML file made of `web/`, goes into wheels and source distributions.

    wheel     web/dist/index.html -> attnconv/explorer/page.html
    sdist     web/dist/index.html, so that a wheel is made of it without Node

`npm ci` and `npm run build` make the file where npm is installed. Without npm a file that is there already is taken;
where there is none, a warning says so, and the wheel works without its page. Editable installs build nothing: there the
page is found in `web/dist`.
"""

import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PAGES = {"wheel": "attnconv/explorer/page.html", "sdist": "web/dist/index.html"}


class PageHook(BuildHookInterface[Any]):
    """Adds the page to what is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the page and name its place in the archive.

        Args:
            version: Of the build: `standard` or `editable`.
            build_data: What hatchling is to do; `force_include` is filled in.

        Raises:
            RuntimeError: npm is there and fails.
        """
        if version == "editable" or self.target_name not in PAGES:
            return
        web = Path(self.root) / "web"
        page = web / "dist" / "index.html"
        npm = shutil.which("npm")
        if npm is not None and (web / "package.json").is_file():
            self._build(npm, web)
        if page.is_file():
            build_data["force_include"][str(page)] = PAGES[self.target_name]
        else:
            why = "npm is not installed" if npm is None else f"{web} holds no sources"
            self.app.display_warning(
                f"attnconv is built without the explorer's page: {why}. Install Node 20.19 or newer and build again; "
                "all else works without it."
            )

    def _build(self, npm: str, web: Path) -> None:
        for command in ([npm, "ci", "--no-audit", "--no-fund"], [npm, "run", "build"]):
            self.app.display_info(" ".join(command[1:]))
            done = subprocess.run(command, cwd=web, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                last = (done.stderr or done.stdout).strip()[-2000:]
                words = " ".join(command[1:])
                raise RuntimeError(f"web: npm {words} must succeed, got status {done.returncode}.\n{last}")
