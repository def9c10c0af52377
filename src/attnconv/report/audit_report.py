"""The report of an audit: `index.html`, `audit.json` and its figures, `figures/scores` and `figures/heads-01-NAME`."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import matplotlib
import torch

import attnconv
from attnconv.inspect.auditing import KERNEL, Audit, LayerAudit
from attnconv.models.preset_tables import Table
from attnconv.report.audit_figures import draw_profiles, draw_scores
from attnconv.report.html_page import Fact, Page, Picture, Section, render
from attnconv.training.run_folder import write_text

_LAYER_CELLS: Mapping[str, Callable[[LayerAudit], str]] = {
    "layer": lambda layer: layer.name,
    "tokens": lambda layer: " x ".join(map(str, layer.sizes)),
    "heads": lambda layer: str(len(layer.statistics.entropy)),
    "score": lambda layer: _number(layer.statistics.convolution_score),
    "constancy": lambda layer: _number(float(layer.statistics.constancy.nanmean())),
    "coverage": lambda layer: _number(layer.statistics.coverage),
    "tap residual": lambda layer: _number(layer.statistics.tap_residual),
    "redundancy": lambda layer: _number(layer.statistics.redundancy),
    "receptive field": lambda layer: _number(layer.statistics.receptive_field, 2),
    "content share": lambda layer: _number(fmean(_content_shares(layer))),
    f"{KERNEL} x {KERNEL} missed": lambda layer: "not known" if layer.span_unknown else _residual(layer.span_residual),
}
LAYER_COLUMNS: tuple[str, ...] = tuple(_LAYER_CELLS)
_HEAD_COLUMNS = ("head", "best shift", "mass", "constancy", "entropy", "distance", "mass elsewhere", "content share")
_SHOWN = 4  # layers whose figures are not folded

_SCORE_TEXT = (
    "The score is the share of attention that a convolution with one tap per head would account for: 1 for a "
    "convolution, 0 for uniform or random attention. Attention in one Gaussian around every query is a convolution "
    "too, with a blurred kernel; it scores little and has a constancy near 1."
)
_LAYER_TEXT = (
    "Constancy: how far the heads' patterns stay the same as the query moves, 0 to 1, mean over heads. Coverage: mean "
    "mass of distinct heads on the taps of the kernel, in the middle of the field, that they could make up. Tap "
    "residual: how far the taps lie outside the span of the heads' mean maps, 0 to 1. Redundancy: mean cosine between "
    "the profiles of two heads. Receptive field: root mean square extent, in tokens. Content share: part of the "
    f"variance of the probabilities that differs between images. {KERNEL} x {KERNEL} missed: the relative part of such "
    "kernels that no value weights of the layer reach, for layers whose attention depends on positions only."
)
_HEAD_TEXT = (
    "The attention of each head on the shifts around its query, mean over queries and images. Shifts are key minus "
    "query, row then column, in tokens. Entropy is in nats, distance in tokens; mass elsewhere goes to class tokens, "
    "registers, other tokens and padding."
)


def write_audit(
    found: Audit, out: str | Path, *, title: str, about: str = "", command: str = "", notes: Sequence[str] = ()
) -> Path:
    """Write an audit as a page, figures and JSON.

    Args:
        found: The result of `audit`.
        out: Folder for the files, created if it does not exist. An older audit in it is replaced; other files stay.
        title: What was audited, the heading of the page.
        about: Where model and images came from, one sentence.
        command: Command line that asked for it; empty if there was none.
        notes: What a reader must know before the numbers. The attentions that were left out are added.

    Returns:
        The page, `index.html`.

    Raises:
        OSError: The files cannot be written.

    Example:
        >>> import tempfile
        >>> from attnconv.inspect import audit
        >>> from attnconv.convert import from_conv
        >>> found = audit(from_conv(torch.nn.Conv2d(3, 4, 3, padding=1)), torch.randn(2, 3, 8, 8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_audit(found, folder, title="a convolution").name
        'index.html'
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "audit.json", json.dumps({"title": title, **found.numbers()}, indent=1, allow_nan=False) + "\n")
    page = Page(
        title=title,
        lead=about or "How convolutional each attention of the model is.",
        facts=_facts(found),
        sections=[_scores(found, out / "figures"), _layers(found), _heads(found, out / "figures")],
        origin=[
            ("attnconv", attnconv.__version__),
            ("torch", torch.__version__),
            ("drawn with", f"matplotlib {matplotlib.__version__}"),
        ],
        command=command,
        notes=[*notes, *found.omissions()],
    )
    path = out / "index.html"
    write_text(path, render(page))
    return path


def layer_row(layer: LayerAudit) -> tuple[str, ...]:
    """One row of the table of layers, with the columns `LAYER_COLUMNS`; a dash where a metric does not apply."""
    return tuple(cell(layer) for cell in _LAYER_CELLS.values())


def _content_shares(layer: LayerAudit) -> list[float]:
    """The content share of each head; NaN if it is not known."""
    shares = layer.statistics.content_share
    if layer.position_only or shares is None:
        return [0.0 if layer.position_only else math.nan] * len(layer.statistics.entropy)
    return shares.tolist()


def _residual(value: float | None) -> str:
    """Three digits if a part is missed; only the magnitude of a rounding error."""
    if value is None:
        return "-"
    return f"{value:.3f}" if value >= 0.001 or value == 0 else f"{value:.0e}"


def _number(value: float, digits: int = 3) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _facts(found: Audit) -> list[Fact]:
    scores = [(layer.statistics.convolution_score, layer.name) for layer in found.layers]
    (most, best), (least, worst) = max(scores), min(scores)
    queries = {(layer.queries, layer.query_count) for layer in found.layers}
    most_queries, of = max(queries)
    aside = (
        f"{most_queries} queries of each, of {of}" if len(queries) == 1 else f"at most {most_queries} queries of each"
    )
    return [
        Fact("Mean score", f"{fmean(score for score, _ in scores):.2f}", "0 chance, 1 a convolution"),
        Fact("Highest score", f"{most:.2f}", best),
        *([Fact("Lowest score", f"{least:.2f}", worst)] if len(scores) > 1 else []),
        Fact("Images", f"{found.images:,}", aside),
    ]


def _scores(found: Audit, folder: Path) -> Section:
    scores = {layer.name: layer.statistics.convolution_score for layer in found.layers}
    figure = draw_scores(list(scores), list(scores.values()), title="Convolution score by layer")
    words = ", ".join(f"{name} {score:.2f}" for name, score in scores.items())
    picture = Picture.saved(
        figure,
        folder / "scores",
        alt=f"Convolution score of each layer. {words}.",
        caption="Layers in the order in which they run.",
    )
    return Section("How convolutional is it?", _SCORE_TEXT, [picture])


def _layers(found: Audit) -> Section:
    rows = tuple(layer_row(layer) for layer in found.layers)
    notes = [
        f"{KERNEL} x {KERNEL} missed is not known of {layer.name}: {layer.span_unknown}."
        for layer in found.layers
        if layer.span_unknown
    ]
    table = Table("Layers, in the order in which they run", LAYER_COLUMNS, rows)
    return Section("Layers", _LAYER_TEXT, notes=notes, tables=[table])


def _heads(found: Audit, folder: Path) -> Section:
    pictures, notes = [], []
    _remove_heads(folder)
    for number, layer in enumerate(found.layers, 1):
        if len(layer.sizes) > 2:
            notes.append(f"{layer.name} has three axes and is not drawn; its metrics are in the table.")
        else:
            name = re.sub(r"[^\w.]+", "-", layer.name).strip("-.")[-60:]
            pictures.append(_profiles(layer, folder / f"heads-{number:02d}-{name}"))
    shown, folded = pictures[:_SHOWN], pictures[_SHOWN:]
    return Section(
        "Heads",
        _HEAD_TEXT,
        pictures=shown,
        folded=folded,
        fold="The other layer" if len(folded) == 1 else f"The other {len(folded)} layers",
        notes=notes,
        folded_tables=[Table(f"Heads of {layer.name}", _HEAD_COLUMNS, _head_rows(layer)) for layer in found.layers],
    )


def _remove_heads(folder: Path) -> None:
    """Remove the figures of heads of an earlier audit, which had other layers."""
    for path in folder.glob("heads-*"):
        if re.fullmatch(r"heads-\d{2,}-[\w.-]*\.(png|svg)", path.name) and path.is_file():
            path.unlink()


def _profiles(layer: LayerAudit, stem: Path) -> Picture:
    figure = draw_profiles(layer, title=f"{layer.name}: score {layer.statistics.convolution_score:.2f}")
    best = zip(layer.statistics.best_shift.tolist(), layer.statistics.shift_mass.tolist(), strict=True)
    words = ", ".join(f"head {head} {mass:.2f} at {tuple(shift)}" for head, (shift, mass) in enumerate(best))
    alt = f"Mean attention per shift of {layer.name}. {words}."
    caption = f"{layer.name}: heads with the most mass on one shift first; each panel has its own scale."
    return Picture.saved(figure, stem, alt=alt, caption=caption)


def _head_rows(layer: LayerAudit) -> tuple[tuple[str, ...], ...]:
    found = layer.statistics
    columns = (found.shift_mass, found.constancy, found.entropy, found.distance, found.padding_mass)
    numbers = [*(column.tolist() for column in columns), _content_shares(layer)]
    return tuple(
        (str(head), f"({', '.join(map(str, shift))})", *map(_number, row))
        for head, (shift, *row) in enumerate(zip(found.best_shift.tolist(), *numbers, strict=True))
    )
