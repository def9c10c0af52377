"""`attnconv prove`: convolutions performed by attention, compared and bounded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from attnconv._util.errors import bad
from attnconv.cli.network_comparison import example_images, plain_table, print_comparison
from attnconv.cli.parsing import parse

if TYPE_CHECKING:
    from attnconv.convert import Proof

_EXAMPLES = """\
attnconv prove
attnconv prove --cases 2000 --seed 1
attnconv prove --model torchvision:resnet18 --pretrained --images cat.jpg dog.jpg
attnconv prove --model my_package.models:network --image-size 64 --alpha 6
"""


@dataclass(frozen=True)
class Prove:
    """Arguments of `attnconv prove`."""

    cases: int = 200
    """How many convolutions to draw, over every option that PyTorch has."""
    seed: int = 0
    """Where the draws begin."""
    model: str | None = None
    """Instead of drawn convolutions: a network, in any form that `attnconv.load` knows, layer by layer."""
    pretrained: bool = False
    """Fetch the trained weights of a network from a library."""
    images: tuple[Path, ...] = ()
    """Pictures for the network; none for an image of noise."""
    image_size: int | None = None
    """Height and width of the network's images; None for its own, or 224."""
    alpha: float | None = None
    """How hard the network's heads are; None for hard ones."""


def run(words: Sequence[str]) -> int:
    """Draw or load, convert, compare, print; status 1 where theory was wrong."""
    about = (
        "Perform convolutions by multi-head attention and compare. Drawn ones go through the softmax, dense (of all "
    )
    about += (
        "scores) and Kronecker (one per axis), with convolutions forbidden meanwhile, and by shifts, the fast form "
    )
    about += "of hard heads; the reference is the convolution of the same weights in float64. A network (--model) goes "
    about += "through the softmax per axis, convolutions forbidden, beside itself in its own dtype."
    arguments = parse(Prove, "prove", words, about=about, examples=_EXAMPLES)
    if arguments.cases < 1:
        raise ValueError(bad("--cases", "must be at least 1", arguments.cases))
    if arguments.model is not None:
        return _prove_model(arguments)
    for flag in ("pretrained", "images", "image_size", "alpha"):
        if getattr(arguments, flag) not in (None, False, ()):
            raise ValueError(bad(f"--{flag.replace('_', '-')}", "is for a network", "no --model", "Name one."))
    return _prove_cases(arguments)


def _prove_cases(arguments: Prove) -> int:
    from rich.progress import track

    from attnconv.convert.verify_theorem import WAYS, prove

    cases, seed = arguments.cases, arguments.seed
    hard = track(prove(cases, seed=seed), description="hard heads", total=cases * len(WAYS), transient=True)
    holds = _print_hard(list(hard))
    soft = prove(cases, seed=seed, alpha="drawn", ways=("kronecker",))
    return 0 if _print_soft(list(track(soft, description="soft heads", total=cases, transient=True))) and holds else 1


def _print_hard(proofs: "list[Proof]") -> bool:
    """Hard heads by dtype and way; whether all keep to what is allowed."""
    from rich.console import Console

    from attnconv.convert.verify_theorem import ALLOWED, WAYS

    columns = ("dtype", "attention", "convolutions", "difference", "allowed", "of its bound")
    table = plain_table("Hard heads: largest relative difference", columns, left=2)
    holds = True
    for dtype, allowed in ALLOWED.items():
        for way in WAYS:
            chosen = [proof for proof in proofs if proof.dtype == dtype and proof.way == way]
            if not chosen:
                continue
            worst, tightest = max(p.relative for p in chosen), max(p.tightness for p in chosen)
            holds &= worst <= allowed and tightest <= 1
            name = str(dtype).removeprefix("torch.")
            table.add_row(name, way, str(len(chosen)), f"{worst:.1e}", f"{allowed:.0e}", f"{tightest:.2f}")
    console = Console()
    console.print(table)
    console.print(_verdict(holds), highlight=False)
    return holds


def _print_soft(proofs: "list[Proof]") -> bool:
    """Soft heads by alpha: how much of the bound is reached."""
    import statistics
    from itertools import pairwise

    from rich.console import Console

    columns = ("alpha", "convolutions", "difference", "of its bound", "at most")
    table = plain_table("\nSoft heads: median relative difference", columns, left=1)
    edges = (0.3, 1.0, 3.0, 10.0, 20.1)
    for low, high in pairwise(edges):
        chosen = [proof for proof in proofs if low <= proof.alpha < high]
        if not chosen:
            continue
        ratios = [proof.tightness for proof in chosen]
        relative = statistics.median(proof.relative for proof in chosen)
        numbers = (f"{relative:.1e}", f"{statistics.median(ratios):.2f}", f"{max(ratios):.2f}")
        table.add_row(f"{low:g} to {min(high, 20):g}", str(len(chosen)), *numbers)
    holds = all(proof.tightness <= 1 for proof in proofs)
    console = Console()
    console.print(table)
    console.print(_verdict(holds), highlight=False)
    return holds


def _verdict(holds: bool) -> str:
    return "All equal within what is allowed, and within their bounds." if holds else "A DIFFERENCE IS TOO LARGE."


def _prove_model(arguments: Prove) -> int:
    import torch

    from attnconv.convert import compare, no_convolutions, recast
    from attnconv.layers import SelfAttention
    from attnconv.models.model_loader import load

    assert arguments.model is not None
    loaded = load(arguments.model, pretrained=arguments.pretrained)
    images = example_images(loaded, arguments.images, arguments.image_size, flag="--images")
    twin = recast(loaded.model, alpha=arguments.alpha, fast=False)
    for layer in twin.modules():
        if isinstance(layer, SelfAttention):
            layer.backend = "structured"
    with torch.no_grad(), no_convolutions():
        twin(images)
    found = compare(loaded.model, twin, images)
    print_comparison(found, f"{loaded.source} as attention through the softmax, on images {tuple(images.shape)}")
    holds = all(row.bound is None or row.error <= row.bound for row in found.layers)
    print("Every layer is within its bound." if holds else "A LAYER EXCEEDS ITS BOUND.")
    return 0 if holds else 1
