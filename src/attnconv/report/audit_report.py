"""Report of an audit: `index.html`, `audit.json`, `audit.csv`, `figures/scores` and `figures/heads-00-NAME`, ..."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import attnconv
from attnconv._util.errors import bad
from attnconv.inspect.auditing import KERNEL, Audit, LayerAudit, omissions
from attnconv.models.preset_tables import Table
from attnconv.report.figure_style import (
    ATTENTION,
    FAINT,
    GRID,
    PanelGrid,
    attention_scale,
    colour_of,
    house_style,
    mark_query,
    nearly_uniform,
    printable,
    shortened,
)
from attnconv.report.html_page import FigureFolder, Page, Section, render
from attnconv.training.run_folder import write_csv, write_text

_LAYER_CELLS: Mapping[str, Callable[[LayerAudit], str]] = {
    "layer": lambda layer: layer.name,
    "positions": lambda layer: " x ".join(map(str, layer.sizes)),
    "heads": lambda layer: str(len(layer.statistics.entropy)),
    "score": lambda layer: _number(layer.statistics.convolution_score),
    "constancy": lambda layer: _number(float(layer.statistics.constancy.nanmean())),
    "coverage": lambda layer: _number(layer.statistics.coverage),
    "tap residual": lambda layer: _number(layer.statistics.tap_residual),
    "redundancy": lambda layer: _number(layer.statistics.redundancy),
    "receptive field (positions)": lambda layer: _number(layer.statistics.receptive_field, 2),
    "content share": lambda layer: _number(fmean(_content_shares(layer))),
    f"{KERNEL} x {KERNEL} residual": lambda layer: "unknown" if layer.span_unknown else _residual(layer.span_residual),
}
LAYER_COLUMNS: tuple[str, ...] = tuple(_LAYER_CELLS)
_HEAD_COLUMNS = ("head", "best shift", "mass", "constancy", "entropy", "distance", "mass elsewhere", "content share")
_SHOWN = 4  # maximum number of layers whose figures are not folded

_BAR, _PANEL = 0.27, 1.25  # inches
_COLUMNS = 6
_LEAST_REACH, _MOST_REACH = 3, 7  # panels of 7 x 7 to 15 x 15 shifts
_NOTE = (
    "Each panel shows the shifts around the query (small frame), in positions, row shifts downwards. Colours show the "
    "mean attention at each shift times the number of positions, on a logarithmic scale; nearly uniform heads are "
    "dark. The orange frame marks the largest value, which is printed below."
)
_SCORE_TEXT = (
    "The convolution score is the share of the attention that a convolution with one tap per head accounts for, "
    "rescaled to 1 for a convolution and 0 for uniform attention; random attention on large grids is slightly above 0. "
    "Heads with the same Gaussian around every query form a blurred convolution: low score, constancy near 1."
)
_LAYER_TEXT = (
    "Positions: rows x columns of the grid of tokens; on images of H x W pixels, one position covers H / rows x W / "
    "columns pixels. Constancy (0 to 1): how constant the attention patterns are as the query moves, averaged over "
    "heads. Coverage (0 to 1): mean attention of distinct heads to the taps of the centred kernel that they could "
    "form. Tap residual (0 to 1): relative distance of these taps from the span of the heads' profiles (mean "
    "attention at each shift). Redundancy (0 to 1): mean cosine between the profiles of two heads. Receptive field: "
    "root mean square distance from the centre of the mean profile. Content share (0 to 1): share of the variance of "
    f"probabilities that is due to differences between images. {KERNEL} x {KERNEL} residual (0: none, about 1: "
    f"nothing fits): relative error of {KERNEL} x {KERNEL} kernels at the query with the largest error, with the value "
    "weights that fit all queries best, if attention depends only on positions."
)
_HEAD_TEXT = (
    "Attention of each head (numbered from 0) at the shifts around the query, averaged over queries and images. A "
    "shift is key minus query, (row, column), in positions. Mass (0 to 1) is the attention at the best shift; mass "
    "elsewhere is that to padding, class tokens and other tokens. Entropy is in nats, and distance in positions."
)


def write_audit(
    found: Audit,
    out: str | Path,
    *,
    title: str,
    about: str = "",
    command: str = "",
    notes: Sequence[str] = (),
    publication: bool = False,
) -> Path:
    """Write an audit as an HTML page with figures, as JSON, and as CSV with one row per head.

    Args:
        found: The result of `audit`.
        out: Output folder, created if it does not exist. An earlier audit in it is replaced; other files are kept.
        title: Title of the page, such as the name of the model.
        about: One sentence about the model and the images.
        command: The command line that ran the audit; empty if there was none.
        notes: Remarks for the top of the page, where skipped layers are also listed.
        publication: Also write the figures as PDF, omit their titles, and keep the text in SVG files editable.

    Returns:
        The path of the page, `index.html`.

    Raises:
        OSError: If the files cannot be written.

    Example:
        >>> import tempfile
        >>> from attnconv.inspect import audit
        >>> found = audit(attnconv.SelfAttention2d(3, 4, heads=2), torch.randn(2, 3, 8, 8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_audit(found, folder, title="two heads").name
        'index.html'
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "audit.json", json.dumps({"title": title, **found.numbers()}, indent=1, allow_nan=False) + "\n")
    write_csv(out / "audit.csv", found.rows())
    figures = FigureFolder(out / "figures", publication)
    versions = {"attnconv": attnconv.__version__, "torch": torch.__version__, "matplotlib": matplotlib.__version__}
    page = Page(
        title=title,
        lead=about or "How convolutional each attention layer of the model is.",
        facts=_facts(found),
        sections=[*_layers(found, figures), _heads(found, figures)],
        origin=list(versions.items()),
        command=command,
        notes=[*notes, *omissions(found.left_out)],
    )
    path = out / "index.html"
    write_text(path, render(page))
    return path


def layer_row(layer: LayerAudit) -> tuple[str, ...]:
    """Return a layer's row of the table of layers, with the columns `LAYER_COLUMNS`; a dash for missing values."""
    return tuple(cell(layer) for cell in _LAYER_CELLS.values())


def _content_shares(layer: LayerAudit) -> list[float]:
    """Return the content share of each head; NaN if it is unknown."""
    shares = layer.statistics.content_share
    if layer.position_only or shares is None:
        return [0.0 if layer.position_only else math.nan] * len(layer.statistics.entropy)
    return shares.tolist()


def _residual(value: float | None) -> str:
    """Format with three decimals, and values below 0.001 with one digit in scientific notation."""
    if value is None:
        return "-"
    return f"{value:.3f}" if value >= 0.001 or value == 0 else f"{value:.0e}"


def _number(value: float, digits: int = 3) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _facts(found: Audit) -> list[tuple[str, str, str]]:
    scores = [(layer.statistics.convolution_score, layer.name) for layer in found.layers]
    (most, best), (least, worst) = max(scores), min(scores)
    queries = {(layer.queries, layer.query_count) for layer in found.layers}
    most_queries, of = max(queries)
    aside = f"at most {most_queries}" if len(queries) > 1 else f"{most_queries} of {of}"
    return [
        ("Mean score", f"{fmean(score for score, _ in scores):.2f}", "0: uniform, 1: convolution"),
        ("Highest score", f"{most:.2f}", best),
        *([("Lowest score", f"{least:.2f}", worst)] if len(scores) > 1 else []),
        ("Images", f"{found.images:,}", f"{aside} queries per image"),
    ]


def _layers(found: Audit, figures: FigureFolder) -> list[Section]:
    scores = {layer.name: layer.statistics.convolution_score for layer in found.layers}
    figure = draw_scores(list(scores), list(scores.values()), title="Convolution score by layer")
    words = ", ".join(f"{name} {score:.2f}" for name, score in scores.items())
    alt, caption = f"Convolution score of each layer. {words}.", "Layers in the order in which they run."
    picture = figures.add(figure, "scores", alt=alt, caption=caption)
    unknown = {layer.name: layer.span_unknown for layer in found.layers if layer.span_unknown}
    notes = [f"{KERNEL} x {KERNEL} residual of {name} is unknown: {reason}." for name, reason in unknown.items()]
    table = Table("Layers, in the order in which they run", LAYER_COLUMNS, tuple(map(layer_row, found.layers)))
    return [
        Section("How convolutional is it?", _SCORE_TEXT, [picture]),
        Section("Layers", _LAYER_TEXT, notes=notes, tables=[table]),
    ]


def _heads(found: Audit, figures: FigureFolder) -> Section:
    pictures, notes = [], []
    for path in figures.path.glob("heads-*"):  # from an earlier audit, which may have other layers
        if re.fullmatch(r"heads-\d{2,}-[\w.-]*\.(png|svg|pdf)", path.name) and path.is_file():
            path.unlink()
    for number, layer in enumerate(found.layers):
        if len(layer.sizes) > 2:
            notes.append(f"{layer.name} has three axes and is not drawn; its statistics are in the table.")
            continue
        figure = draw_profiles(layer, title=f"{layer.name}: score {layer.statistics.convolution_score:.2f}")
        masses = layer.statistics.shift_mass.tolist()
        best = zip(layer.statistics.best_shift.tolist(), masses, strict=True)
        words = ", ".join(f"head {head}: {mass:.2f} at {tuple(shift)}" for head, (shift, mass) in enumerate(best))
        alt = f"Mean attention at each shift in {layer.name}. {words}."
        caption = f"{layer.name}: heads sorted by their largest mean attention."
        keys = layer.statistics.profile.key_count
        if uniform := [str(head) for head, mass in enumerate(masses) if nearly_uniform(mass, keys)]:
            caption += f" Nearly uniform heads (less than 2/{keys} at every shift): {', '.join(uniform)}."
        name = re.sub(r"[^\w.]+", "-", layer.name).strip("-.")[-60:]
        pictures.append(figures.add(figure, f"heads-{number:02d}-{name}", alt=alt, caption=caption))
    shown, folded = pictures[:_SHOWN], pictures[_SHOWN:]
    fold = "The other layer" if len(folded) == 1 else f"The other {len(folded)} layers"
    tables = [Table(f"Heads of {layer.name}", _HEAD_COLUMNS, _head_rows(layer)) for layer in found.layers]
    return Section("Heads", _HEAD_TEXT, shown, folded=folded, fold=fold, notes=notes, folded_tables=tables)


def _head_rows(layer: LayerAudit) -> tuple[tuple[str, ...], ...]:
    found = layer.statistics
    columns = (found.shift_mass, found.constancy, found.entropy, found.distance, found.padding_mass)
    numbers = [*(column.tolist() for column in columns), _content_shares(layer)]
    return tuple(
        (str(head), f"({', '.join(map(str, shift))})", *map(_number, row))
        for head, (shift, *row) in enumerate(zip(found.best_shift.tolist(), *numbers, strict=True))
    )


@house_style()
def draw_scores(names: Sequence[str], scores: Sequence[float], *, title: str) -> Figure:
    """Draw the convolution score of each layer as a bar, with the first layer at the top.

    Args:
        names: Names of the layers.
        scores: One score per layer, from 0 to 1.
        title: Title of the figure.

    Raises:
        ValueError: If there is no layer, or the number of scores differs from the number of names.
    """
    if not names or len(names) != len(scores):
        raise ValueError(bad("scores", f"must contain one score per name ({len(names)}), at least one", len(scores)))
    figure = Figure(figsize=(7.5, 1.3 + _BAR * len(names)), layout="constrained")
    figure.suptitle(printable(title, width=70))
    axes = figure.subplots()
    places = range(len(names))
    bars = axes.barh(places, scores, height=0.66, color=colour_of(0))
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8.0)
    axes.set_yticks(places, [shortened(name) for name in names])
    axes.set(xlim=(0, 1), ylim=(len(names) - 0.5, -0.5), xlabel="convolution score", axisbelow=True)
    axes.tick_params(left=False)
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("0: uniform attention", loc="left", fontsize=8.0, color=FAINT)
    axes.set_title("1: a convolution", loc="right", fontsize=8.0, color=FAINT)
    return figure


@house_style()
def draw_profiles(layer: LayerAudit, *, title: str) -> Figure:
    """Draw the mean attention of each head at the shifts around the query, with the heads sorted by largest value.

    Panels show 7 shifts per axis, or up to 15 if the best shifts of all heads require more.

    Args:
        layer: A layer with one or two axes.
        title: Title of the figure.

    Raises:
        ValueError: If the layer has more than two axes.
    """
    profile = layer.statistics.profile
    if len(profile.reach) > 2:
        fix = "Sum its shift profile over one axis."
        raise ValueError(bad("layer", "must have one or two axes", len(profile.reach), fix))
    best, mass = layer.statistics.best_shift.tolist(), layer.statistics.shift_mass.tolist()
    # Smallest and largest shift of rows and columns; a single axis is drawn along the columns.
    (up, down), (back, on) = reach = profile.reach if len(profile.reach) == 2 else ((0, 0), *profile.reach)
    far = min(max(_LEAST_REACH, *(abs(step) for shift in best for step in shift)), _MOST_REACH)
    (top, bottom), (left, right) = [(max(-far, least), min(far, most)) for least, most in reach]
    shown = profile.mass.cpu().numpy().reshape(-1, down - up + 1, on - back + 1)
    order = sorted(range(len(mass)), key=lambda head: -mass[head])
    columns = min(_COLUMNS, len(order))
    height = _PANEL * min(1.0, (bottom - top + 1) / (right - left + 1))
    widths, heights = [_PANEL] * columns, [height] * math.ceil(len(order) / columns)
    grid = PanelGrid(widths, heights, title=title, note=_NOTE, gap=(0.3, 0.6), left=0.4, above=0.2, below=0.85)
    scale = attention_scale(profile.key_count)
    for place, head in enumerate(order):
        axes = grid.add(*divmod(place, columns))
        extent = (back - 0.5, on + 0.5, down + 0.5, up - 0.5)
        axes.imshow(shown[head] * profile.key_count, cmap=ATTENTION, norm=scale, extent=extent)
        mark_query(axes, (0.0, 0.0))
        where = "(nearly uniform)"
        if not nearly_uniform(mass[head], profile.key_count):
            where = f"at ({', '.join(map(str, best[head]))})"
            corner = (best[head][-1] - 0.36, (best[head][0] if len(best[head]) == 2 else 0) - 0.36)
            axes.add_patch(Rectangle(corner, 0.72, 0.72, fill=False, edgecolor=colour_of(1), linewidth=1.3))
        axes.spines[:].set_linewidth(0.6)
        axes.set_title(f"head {head}", size=8.0, pad=2.5)
        axes.set_xlabel(f"{mass[head]:#.3g} {where}", size=7.0, color=FAINT, labelpad=1.5)
        axes.set(xlim=(left - 0.5, right + 0.5), ylim=(bottom + 0.5, top - 0.5))
        axes.set(xticks=sorted({left, 0, right}), yticks=sorted({top, 0, bottom}))
        axes.tick_params(labelsize=6.5, length=2.0, pad=1.5, labelleft=place % columns == 0)
    grid.add_legend(scale)
    return grid.figure
