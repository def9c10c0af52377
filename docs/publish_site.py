"""Add a built site to a folder of versions, with a page that opens the newest: publish_site.py BUILT SITE VERSION."""

import re
import shutil
import sys
from pathlib import Path

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>attnconv</title>
<meta http-equiv="refresh" content="0; url={first}/index.html">
<p>Versions of the documentation:</p>
<ul>
{items}
</ul>
</html>
"""


def publish(built: Path, site: Path, version: str) -> None:
    """Replace the folder of a version with the built site, and write the page that lists all versions."""
    shutil.rmtree(site / version, ignore_errors=True)
    shutil.copytree(built, site / version, ignore=shutil.ignore_patterns(".*"))  # without Sphinx's caches
    (site / ".nojekyll").touch()  # serve folders whose names begin with an underscore
    versions = [folder.name for folder in site.iterdir() if (folder / "index.html").is_file()]
    versions.sort(key=newest_last, reverse=True)
    items = "\n".join(f'<li><a href="{name}/index.html">{name}</a></li>' for name in versions)
    first = next((name for name in versions if newest_last(name)[-1:] == (True,)), versions[0])
    (site / "index.html").write_text(PAGE.format(first=first, items=items), encoding="utf-8")


def newest_last(version: str) -> tuple[int, ...]:
    """Return a key that orders branches before releases vX.Y.Z, and pre-releases before their release."""
    match = re.fullmatch(r"v(\d+)\.(\d+)\.(\d+)(.*)", version)
    return () if match is None else (*map(int, match.groups()[:3]), match[4] == "")


if __name__ == "__main__":
    publish(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
