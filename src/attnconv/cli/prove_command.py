"""`attnconv prove`: convolutions performed by attention, compared and bounded."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from attnconv._util.errors import bad
from attnconv._util.settings import Natural
from attnconv.cli.network_comparison import example_images, print_comparison
from attnconv.cli.parsing import parse
from attnconv.cli.tables import print_table, print_text

if TYPE_CHECKING:
    from attnconv.convert import Proof


@dataclass(frozen=True)
class Prove:
    """Perform convolutions by multi-head attention, and compare the outputs.

    Random convolutions go through the softmax, dense (of all scores) and Kronecker (one per axis), with convolutions
    forbidden meanwhile, and by shifts, the fast form of hard heads; the reference is the convolution of the same
    weights in float64. A network (--model) goes through the softmax per axis, convolutions forbidden, and is compared
    with itself in its own dtype.

    Examples:
        attnconv prove
        attnconv prove --cases 2000 --seed 1
        attnconv prove --model torchvision:resnet18 --pretrained --images cat.jpg dog.jpg
        attnconv prove --model my_package.models:network --image-size 64 --alpha 6

    Attributes:
        cases: Number of random convolutions, over every option that PyTorch has.
        seed: Seed of the random convolutions.
        model: Instead of random convolutions: a network, in any form that `attnconv.load` knows, layer by layer.
        pretrained: Fetch the trained weights of a network from a library.
        images: Pictures for the network; none for an image of noise.
        image_size: Height and width of the network's images; None for its own, or 224.
        alpha: How hard the network's heads are; None for hard ones.
    """

    cases: Natural = 200
    seed: int = 0
    model: str | None = None
    pretrained: bool = False
    images: tuple[Path, ...] = ()
    image_size: Natural | None = None
    alpha: float | None = None


def run(words: Sequence[str]) -> int:
    """Draw or load, convert, compare, print; status 1 where a bound does not hold."""
    arguments = parse(Prove, words)
    if arguments.model is not None:
        return _prove_model(arguments)
    for flag in ("pretrained", "images", "image_size", "alpha"):
        if getattr(arguments, flag) not in (None, False, ()):
            raise ValueError(bad(f"--{flag.replace('_', '-')}", "is for a network", "no --model", "Name one."))
    return _prove_cases(arguments)


def _prove_cases(arguments: Prove) -> int:
    from rich.progress import track

    from attnconv.convert.verify_conversions import WAYS, prove

    cases, seed = arguments.cases, arguments.seed
    hard = track(prove(cases, seed=seed), description="hard heads", total=cases * len(WAYS), transient=True)
    holds = _print_hard(list(hard))
    soft = prove(cases, seed=seed, alpha="drawn", ways=("kronecker",))
    return 0 if _print_soft(list(track(soft, description="soft heads", total=cases, transient=True))) and holds else 1


def _print_hard(proofs: "list[Proof]") -> bool:
    """Print hard heads by dtype and way; return whether all are within the allowed difference."""
    from attnconv.convert.verify_conversions import ALLOWED, WAYS

    rows, holds = [], True
    for dtype, way in product(ALLOWED, WAYS):
        chosen = [proof for proof in proofs if proof.dtype == dtype and proof.way == way]
        if chosen:
            worst, tightest = max(p.relative for p in chosen), max(p.tightness for p in chosen)
            holds &= worst <= ALLOWED[dtype] and tightest <= 1
            numbers = (str(len(chosen)), f"{worst:.1e}", f"{ALLOWED[dtype]:.0e}", f"{tightest:.2f}")
            rows.append((str(dtype).removeprefix("torch."), way, *numbers))
    columns = ("dtype", "attention", "convolutions", "difference", "allowed", "of its bound")
    print_table("Hard heads: largest relative difference", columns, rows, left=2)
    print_text(_verdict(holds))
    return holds


def _print_soft(proofs: "list[Proof]") -> bool:
    """Print how much of the bound soft heads reach, by alpha; return whether all are within it."""
    rows = []
    for low, high in pairwise((0.3, 1.0, 3.0, 10.0, 20.1)):
        chosen = [proof for proof in proofs if low <= proof.alpha < high]
        if chosen:
            ratios = [proof.tightness for proof in chosen]
            relative = median(proof.relative for proof in chosen)
            numbers = (str(len(chosen)), f"{relative:.1e}", f"{median(ratios):.2f}", f"{max(ratios):.2f}")
            rows.append((f"{low:g} to {min(high, 20):g}", *numbers))
    columns = ("alpha", "convolutions", "difference", "of its bound", "at most")
    print_table("\nSoft heads: median relative difference", columns, rows)
    holds = all(proof.tightness <= 1 for proof in proofs)
    print_text(_verdict(holds))
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
