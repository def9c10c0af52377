"""Build hooks: the explorer's page, an HTML file built from `web/`, and the README with absolute links.

    wheel     web/dist/index.html -> attnconv/explorer/page.html
    sdist     web/dist/index.html, so that a wheel can be built from it without Node

If npm is installed, `npm ci` and `npm run build` build the file. Otherwise an existing file is used; without one, a
warning is shown, and the explorer of the wheel has no page. Editable installs build nothing, because they read the page
from `web/dist`.

If the environment names a repository, as in workflows of GitHub (`GITHUB_SERVER_URL`, `GITHUB_REPOSITORY` and
`GITHUB_REF_NAME`), the README's relative links are made absolute, so that its pictures are shown on a package index.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

PAGES = {"wheel": "attnconv/explorer/page.html", "sdist": "web/dist/index.html"}


class PageHook(BuildHookInterface[Any]):
    """Build hook that adds the explorer's page."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the page and set its path in the archive.

        Args:
            version: Version of the build: `standard` or `editable`.
            build_data: Build options of hatchling; `force_include` is changed in place.

        Raises:
            RuntimeError: If npm is installed and fails.
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
            why = "npm is not installed" if npm is None else f"{web} contains no sources"
            self.app.display_warning(
                f"attnconv is built without the explorer's page: {why}. To include it, install Node 20.19 or newer and "
                "build again. Everything else works without it."
            )

    def _build(self, npm: str, web: Path) -> None:
        for command in ([npm, "ci", "--no-audit", "--no-fund"], [npm, "run", "build"]):
            self.app.display_info(" ".join(command[1:]))
            done = subprocess.run(command, cwd=web, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                last = (done.stderr or done.stdout).strip()[-2000:]
                words = " ".join(command[1:])
                raise RuntimeError(f"web: npm {words} must succeed, got status {done.returncode}.\n{last}")


class ReadmeHook(MetadataHookInterface):
    """Metadata hook that sets the long description and the addresses of the project."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme` and `urls` in the metadata."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        names = ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_REF_NAME")
        server, repository, ref = (os.environ.get(name, "") for name in names)
        metadata["urls"] = {}
        if server and repository and ref:
            address = f"{server}/{repository}"
            owner, _, name = repository.partition("/")
            metadata["urls"] = {
                "Documentation": f"https://{owner}.github.io/{name}",  # see .github/workflows/site.yml
                "Source": address,
                "Issues": f"{address}/issues",
                "Changelog": f"{address}/blob/{ref}/CHANGELOG.md",
            }
            for start, kind in ((r"!\[[^\]]*\]", "raw"), (r"(?<!!)\[[^\]]*\]", "blob")):
                relative = rf"({start}\()(?!https?:|#)([^)]+\))"
                text = re.sub(relative, rf"\1{address}/{kind}/{ref}/\2", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
