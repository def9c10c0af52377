"""Draw images/overview.png: the heads of two layers before and after training, from a run in results/."""

import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from attnconv import Grid, Quadratic  # noqa: E402
from attnconv.report import LayerMaps, draw_attention_maps  # noqa: E402
from attnconv.report.attention_maps import reading_order  # noqa: E402

RUN = ROOT / "results" / "paper-small" / "runs" / "quadratic"
GRID, QUERY, LAYERS = Grid.make((8, 8)), (4, 4), (0, 1)


def maps(heads: dict[str, list[list[float]]]) -> torch.Tensor:
    """The attention of the query, (heads, rows, columns), for the Gaussian heads of one layer at one epoch."""
    encoding = Quadratic(len(heads["centres"]), 2).double()
    with torch.no_grad():
        encoding.centres.copy_(torch.tensor(heads["centres"]))
        encoding.spread.copy_(torch.tensor(heads["covariance"])[:, 0, :1].rsqrt())
        operator = encoding.operator(GRID, torch.zeros(1, *GRID.sizes, 1, dtype=torch.float64))
        return operator.rows(torch.tensor([QUERY[0] * 8 + QUERY[1]]))[0, :, 0].unflatten(-1, GRID.sizes)


if __name__ == "__main__":
    epochs = [json.loads(line) for line in (RUN / "heads.jsonl").read_text(encoding="utf-8").splitlines()]
    rows, orders = [], []
    for layer in LAYERS:
        before, after = (maps(epoch["layers"][layer]) for epoch in (epochs[0], epochs[-1]))
        rows += [
            LayerMaps(f"layer {layer},\nepoch {epoch}", shown, QUERY) for epoch, shown in ((0, before), (30, after))
        ]
        orders += [reading_order(after.numpy())] * 2
    title = "Attention of one query in each of nine heads, before and after training"
    figure = draw_attention_maps(rows, title=title, orders=orders)
    figure.savefig(ROOT / "docs" / "images" / "overview.png", dpi=170)
