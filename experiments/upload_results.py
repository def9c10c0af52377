"""Upload every folder in `results/` that has weights to the Hugging Face hub, each to a repository of its own.

    python -m experiments.upload_results --owner OWNER
    python -m experiments.upload_results --owner OWNER --upload

The first command only prints the folders and repositories. The second one uploads them with
`attnconv.models.save_to_hub`, and prints the names with the commits, which `attnconv.load` accepts. Folders that have
not changed since the last upload get no new commit. Log in first with `hf auth login`.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from attnconv.models.hub_download import WEIGHTS
from attnconv.models.hub_upload import save_to_hub

RESULTS = Path(__file__).resolve().parent.parent / "results"


@dataclass(frozen=True)
class Settings:
    """Arguments of the script."""

    owner: str
    """User or organisation on the hub."""
    upload: bool = False
    """Upload the folders; by default, they are only printed."""
    private: bool = False
    """Create private repositories."""
    results: Path = RESULTS
    """Folder of the results."""


def repositories(owner: str, results: Path) -> dict[Path, str]:
    """Return each folder with weights and its repository, named after the folder's path without `runs`."""
    folders = sorted(path.parent for path in results.rglob(WEIGHTS))
    parts = {folder: [part for part in folder.relative_to(results).parts if part != "runs"] for folder in folders}
    return {folder: f"{owner}/attnconv-{'-'.join(names)}" for folder, names in parts.items()}


def main(settings: Settings) -> None:
    """Print or upload the folders."""
    for folder, repository in repositories(settings.owner, settings.results).items():
        place = folder.relative_to(settings.results).as_posix()
        size = (folder / WEIGHTS).stat().st_size / 1e6
        name = save_to_hub(folder, repository, private=settings.private) if settings.upload else f"hub:{repository}"
        print(f"{place} ({size:.1f} MB): {name}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Settings))
