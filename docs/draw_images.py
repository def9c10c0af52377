"""Draw figures of the documentation from the runs in results/: python docs/draw_images.py

The figures `speed-*` and `sequence-*` are not drawn here, but copied from the output of `benchmarks` and
`experiments.sequence`.
"""

import json
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from attnconv import Grid, Quadratic, load
from attnconv.inspect.chosen_queries import mean_query_maps
from attnconv.paper.figures import FIGURES
from attnconv.report import HeadGaussians, LayerMaps, draw_attention_maps, draw_centres
from attnconv.report.attention_maps import draw_query, reading_order
from attnconv.report.run_data import PLACES
from attnconv.surgery.head_pruning import attention_layers

ROOT = Path(__file__).resolve().parent.parent
RUNS, PICTURES = ROOT / "results", ROOT / "docs" / "images"
SIZES, QUERY = (8, 8), (4, 4)  # grid of the models in `results`, and row and column of the query


def main() -> None:
    """Draw all figures."""
    small, earlier, learned = "paper-small/runs/quadratic", "cifar10-small/quadratic-small", "paper-small/runs/learned"
    write(overview(small), "overview")
    write(centres(small, title="Heads of the quadratic model after 30 epochs"), "paper-small-figure-04")
    write(centres(earlier, title="Heads of quadratic-small after 30 epochs"), "cifar10-small-centres")
    write(maps(earlier, title="Attention of one query, quadratic-small"), "cifar10-small-attention")
    title = "Attention within 7 x 7 positions of the query, learned encoding"
    write(maps(learned, title=title, zoom=7), "paper-small-figure-05")
    write(FIGURES[11].draw("Figure 11"), "figure-11")


def write(figure: Figure, name: str) -> None:
    """Save a figure as PNG."""
    figure.savefig(PICTURES / f"{name}.png", dpi=170)


def overview(run: str) -> Figure:
    """Draw the attention maps of every head in two layers, before and after training."""
    epochs = [json.loads(line) for line in (RUNS / run / "heads.jsonl").read_text(encoding="utf-8").splitlines()]
    rows, orders = [], []
    for layer in (0, 1):
        before, after = (gaussian_maps(epoch["layers"][layer]) for epoch in (epochs[0], epochs[-1]))
        rows += [LayerMaps(f"layer {layer},\nepoch {epoch}", m, QUERY) for epoch, m in ((0, before), (30, after))]
        orders += [reading_order(after)] * 2
    title = "Attention of one query in each of nine heads, before and after training"
    return draw_attention_maps(rows, title=title, orders=orders)


@torch.no_grad()
def gaussian_maps(heads: dict[str, Any]) -> Any:
    """Return the attention of the query, (heads, rows, columns), for one layer of a line in `heads.jsonl`."""
    encoding, grid = Quadratic(len(heads["centres"]), 2).double(), Grid.make(SIZES)
    encoding.centres.copy_(torch.tensor(heads["centres"]))
    encoding.spread.copy_(torch.tensor(heads["covariance"])[:, 0, :1].rsqrt())
    operator = encoding.operator(grid, torch.zeros(1, *SIZES, 1, dtype=torch.float64))
    rows = operator.rows(torch.tensor([QUERY[0] * SIZES[1] + QUERY[1]]))
    return rows[0, :, 0].unflatten(-1, SIZES).numpy()


def centres(run: str, *, title: str) -> Figure:
    """Draw the head centres of every layer."""
    model = load(RUNS / run / "weights.safetensors").model.float()
    encodings: Any = [layer.encoding for layer in attention_layers(model).values()]
    variances = [encoding.spread.detach().expand(-1, 2) ** -2 for encoding in encodings]  # infinite for uniform heads
    heads = [
        HeadGaussians(encoding.centres.detach(), torch.diag_embed(variance))
        for encoding, variance in zip(encodings, variances, strict=True)
    ]
    return draw_centres(heads, title=title, sizes=SIZES)


def maps(run: str, *, title: str, zoom: int | None = None) -> Figure:
    """Draw the attention maps of every head in every layer of a model whose attention ignores the image."""
    model = load(RUNS / run / "weights.safetensors").model.float()
    return draw_query(mean_query_maps(model, torch.zeros(1, 3, 32, 32), places=PLACES), 0, title=title, zoom=zoom)


if __name__ == "__main__":
    main()
