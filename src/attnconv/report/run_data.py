"""What figures need of a run folder: its accuracy curves, and where its heads stood after every epoch."""

from collections.abc import Sequence
from pathlib import Path

from attnconv._util.errors import bad
from attnconv.report.accuracy_curves import SPLITS, Curve, draw_accuracy
from attnconv.report.figure_style import save
from attnconv.report.gaussian_contours import HeadGaussians
from attnconv.training.run_folder import RunFolder


def run_name(run: RunFolder) -> str:
    """The folder's name, also where it was given as `.`."""
    return run.path.resolve().name


def curves_of(run: RunFolder) -> list[Curve]:
    """The accuracy of a run, one curve for each split that was measured.

    Raises:
        ValueError: No epoch of the run is complete.
    """
    lines = run.metrics()
    if not lines:
        fix = "Wait for the first line of metrics.jsonl."
        raise ValueError(bad("run", "must have completed an epoch", str(run.path), fix))
    curves = []
    for split in SPLITS:
        points = {line["epoch"]: line["accuracy"] for line in lines if line["split"] == split}
        if points:
            curves.append(Curve.of(run_name(run), split, list(points), list(points.values())))
    return curves


def heads_of(run: RunFolder) -> dict[str, list[tuple[int, HeadGaussians]]]:
    """Name of each layer whose heads have centres -> its heads at the start (epoch 0) and after every epoch."""
    history: dict[str, list[tuple[int, HeadGaussians]]] = {}
    for line in run.heads():
        for layer in line["layers"]:
            heads = HeadGaussians.of(layer["centres"], layer["covariance"])
            history.setdefault(layer["name"], []).append((line["epoch"], heads))
    return history


def write_comparison(
    run_dirs: Sequence[str | Path], stem: str | Path, *, title: str = "", split: str | None = None
) -> tuple[Path, Path]:
    """Figure 2: the accuracy of several runs in one picture.

    Args:
        run_dirs: Their folders, at least one.
        stem: Where to write, without an ending.
        title: Heading; empty makes one.
        split: `train`, `validation` or `test`; None takes the last of these that every run has measured.

    Returns:
        The PNG and the SVG file.

    Raises:
        ValueError: No run, a folder without a run, or a run that has not measured the split.
    """
    if not run_dirs:
        raise ValueError(bad("run_dirs", "must name at least one run folder", "none"))
    measured = {str(path): {curve.split: curve for curve in curves_of(_existing(path))} for path in run_dirs}
    common = [name for name in SPLITS if all(name in curves for curves in measured.values())]
    chosen = split if split is not None else common[-1] if common else "test"
    missing = [path for path, curves in measured.items() if chosen not in curves]
    if missing:
        raise ValueError(bad("split", "must be measured by every run", repr(chosen), origin=f"not in {missing[0]}"))
    figure = draw_accuracy(
        [curves[chosen] for curves in measured.values()], title=title or f"{chosen} accuracy of {len(measured)} runs"
    )
    return save(figure, Path(stem))


def _existing(path: str | Path) -> RunFolder:
    run = RunFolder(Path(path))
    run.record()
    return run
