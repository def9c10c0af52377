"""The report of an audit: its numbers, its figures as PNG and SVG, and one HTML page that holds everything.

OUT/index.html
OUT/audit.json
OUT/figures/scores.png, .svg
            heads-01-NAME.png, .svg ...
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import torch

import attnconv
from attnconv.inspect.auditing import Audit, LayerAudit
from attnconv.inspect.kernel_expressibility import KERNEL
from attnconv.models.preset_tables import Table
from attnconv.report.audit_figures import draw_profiles, draw_scores
from attnconv.report.figure_style import save
from attnconv.report.html_page import Fact, Page, Picture, Section, render
from attnconv.training.run_folder import write_text

LAYER_COLUMNS = (
    "layer",
    "tokens",
    "heads",
    "score",
    "constancy",
    "coverage",
    "tap residual",
    "redundancy",
    "receptive field",
    "content share",
    f"{KERNEL} x {KERNEL} missed",
)
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
    "residual: how far the taps "
    "lie outside the span of the heads' mean maps, 0 to 1. Redundancy: mean cosine between the profiles of two heads. "
    "Receptive field: root mean square extent, in tokens. Content share: part of the "
    f"variance of the probabilities that differs between images. {KERNEL} x {KERNEL} missed: the relative part of such "
    "kernels that no value weights of the layer reach, for layers that look at positions alone."
)
_HEAD_TEXT = (
    "What each head puts on the shifts around its query, mean over queries and images. Shifts are key minus query, row "
    "then column, in tokens. Entropy is in nats, distance in tokens; mass elsewhere is what goes to class tokens, "
    "registers, other tokens and padding."
)


def write_audit(
    found: Audit,
    out: str | Path,
    *,
    title: str,
    about: str = "",
    command: str = "",
    notes: Sequence[str] = (),
) -> Path:
    """Write an audit as a page, figures and numbers.

    Args:
        found: What `audit` gave.
        out: Folder for the files, made where it is missing. Files of an older audit are replaced; its figures of heads
            that this one has no place for are removed. Nothing else in the folder is touched.
        title: What was audited, the heading of the page.
        about: Where model and images came from, one sentence.
        command: Command line that asked for it; empty if there was none.
        notes: What a reader must know before the numbers. What the audit left out is added to it.

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
        tables=(),
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
    """One line of the table of layers, as `LAYER_COLUMNS` name it; a dash where a number does not apply."""
    found = layer.statistics
    content = None if found.content_share is None else float(found.content_share.mean())
    if layer.position_only:
        content = 0.0
    return (
        layer.name,
        " x ".join(map(str, layer.sizes)),
        str(len(found.entropy)),
        f"{found.convolution_score:.3f}",
        _number(float(found.constancy.nanmean())),
        f"{found.coverage:.3f}",
        f"{found.tap_residual:.3f}",
        f"{found.redundancy:.3f}",
        _number(found.receptive_field, 2),
        _number(content),
        "not known" if layer.span_unknown else _residual(layer.span_residual),
    )


def _residual(value: float | None) -> str:
    """Three digits where there is something to miss, and the size of the rounding where there is not."""
    if value is None:
        return "-"
    return f"{value:.3f}" if value >= 0.001 or value == 0 else f"{value:.0e}"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _facts(found: Audit) -> list[Fact]:
    scores = {layer.name: layer.statistics.convolution_score for layer in found.layers}
    most, least = max(scores, key=scores.__getitem__), min(scores, key=scores.__getitem__)
    first = found.layers[0]
    several = len({layer.queries for layer in found.layers}) > 1
    looked = "at most " if several else ""
    facts = [
        Fact("Mean score", f"{sum(scores.values()) / len(scores):.2f}", "0 chance, 1 a convolution"),
        Fact("Highest score", f"{scores[most]:.2f}", most),
    ]
    if len(scores) > 1:
        facts.append(Fact("Lowest score", f"{scores[least]:.2f}", least))
    queries = max(layer.queries for layer in found.layers)
    aside = f"{looked}{queries} queries of each" + ("" if several else f", of {first.query_count}")
    return [*facts, Fact("Images", f"{found.images:,}", aside)]


def _scores(found: Audit, folder: Path) -> Section:
    scores = {layer.name: layer.statistics.convolution_score for layer in found.layers}
    figure = draw_scores(list(scores), list(scores.values()), title="Convolution score by layer")
    png, svg = save(figure, folder / "scores")
    words = ", ".join(f"{name} {score:.2f}" for name, score in scores.items())
    caption = "Layers in the order in which they run."
    picture = Picture(png, svg, figure.get_figwidth(), f"Convolution score of each layer. {words}.", caption)
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
            notes.append(f"{layer.name} has three axes and is not drawn; its numbers stand in the table.")
            continue
        pictures.append(_profiles(layer, folder / f"heads-{number:02d}-{_file_name(layer.name)}"))
    tables = [Table(f"Heads of {layer.name}", _HEAD_COLUMNS, _head_rows(layer)) for layer in found.layers]
    fold = f"The other {len(pictures) - _SHOWN} layers"
    shown, folded = pictures[:_SHOWN], pictures[_SHOWN:]
    return Section("Heads", _HEAD_TEXT, shown, folded, fold, notes, folded_tables=tables)


def _remove_heads(folder: Path) -> None:
    """Take away the figures of heads of an earlier audit: of other layers, they would pass for this one's."""
    for path in folder.glob("heads-*"):
        if re.fullmatch(r"heads-\d{2,}-[\w.-]*\.(png|svg)", path.name) and path.is_file():
            path.unlink()


def _profiles(layer: LayerAudit, stem: Path) -> Picture:
    figure = draw_profiles(layer, title=f"{layer.name}: score {layer.statistics.convolution_score:.2f}")
    png, svg = save(figure, stem)
    best = zip(layer.statistics.best_shift.tolist(), layer.statistics.shift_mass.tolist(), strict=True)
    words = ", ".join(f"head {head} {mass:.2f} at {tuple(shift)}" for head, (shift, mass) in enumerate(best))
    caption = f"{layer.name}: heads with the most mass on one shift first; each panel has its own scale."
    return Picture(png, svg, figure.get_figwidth(), f"Mean attention per shift of {layer.name}. {words}.", caption)


def _head_rows(layer: LayerAudit) -> tuple[tuple[str, ...], ...]:
    found = layer.statistics
    columns: Mapping[str, list[float]] = {
        name: getattr(found, name).tolist()
        for name in ("shift_mass", "constancy", "entropy", "distance", "padding_mass")
    }
    content = [0.0 if layer.position_only else None] * len(found.entropy)
    if found.content_share is not None and not layer.position_only:
        content = found.content_share.tolist()
    return tuple(
        (
            str(head),
            f"({', '.join(map(str, shift))})",
            *(_number(column[head]) for column in columns.values()),
            _number(content[head]),
        )
        for head, shift in enumerate(found.best_shift.tolist())
    )


def _file_name(name: str) -> str:
    """A layer's name as part of a file's."""
    return re.sub(r"[^\w.]+", "-", name).strip("-.")[-60:]
