"""`attnconv prove`: convolutions performed by attention, compared and bounded."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from attnconv._util.settings import Fine, Natural, Problem
from attnconv.cli.image_inputs import ImageOptions, Subject, example_images
from attnconv.cli.output import print_comparison, print_table, print_text

if TYPE_CHECKING:
    from attnconv.convert.verify_conversions import Proof

_ALPHAS = (1.0, 3.0, 10.0, 20.1)  # below which soft heads are counted together


@dataclass(frozen=True, kw_only=True)
class Arguments(ImageOptions):
    """Perform convolutions by multi-head attention, and compare the outputs.

    Random convolutions go through the softmax, dense (of all scores) and Kronecker (one per axis), with convolutions
    forbidden meanwhile, and by shifts, the fast form of hard heads; the reference is the convolution of the same
    weights in float64. A network (--model) goes through the softmax per axis, convolutions forbidden, and is compared
    with itself in its own dtype.

    Examples:
        attnconv prove
        attnconv prove --cases 2000 --seed 1
        attnconv prove --model torchvision:resnet18 --pretrained --data PATH/TO/PICTURES
        attnconv prove --model my_package.models:network --size 64 --alpha 6

    Attributes:
        cases: Number of random convolutions, over every option that PyTorch has.
        seed: Seed of the random convolutions.
        model: Instead of random convolutions: a network, in any form that `attnconv.load` knows, layer by layer.
        alpha: How hard the network's heads are; None for hard ones.
    """

    cases: Natural = 200
    seed: int = 0
    model: str | None = None
    alpha: float | None = None

    def conflicts(self, _: Fine) -> Iterator[Problem]:
        """Flags that are given without the --model that they are for."""
        for name in ("data", "size", "pretrained", "alpha"):
            if self.model is None and getattr(self, name) not in (None, False):
                yield Problem(name, "is for a network", fix="Name one with --model.")


def run(arguments: Arguments) -> int:
    """Draw or load, convert, compare, print; status 1 where a bound does not hold."""
    holds = _prove_cases(arguments) if arguments.model is None else _prove_model(arguments.model, arguments)
    return 0 if holds else 1


def _prove_cases(arguments: Arguments) -> bool:
    """Print differences by form of attention and sharpness; return whether all are within what is allowed."""
    from rich.progress import track

    from attnconv.convert.verify_conversions import ALLOWED, WAYS, prove

    cases, seed = arguments.cases, arguments.seed
    hard = track(prove(cases, seed=seed), description="hard heads", total=cases * len(WAYS), transient=True)
    drawn = prove(cases, seed=seed, soft=True)
    soft = track(drawn, description="soft heads", total=cases, transient=True)
    groups: dict[str, list[Proof]] = {}
    for proof in hard:
        groups.setdefault(f"{str(proof.dtype).removeprefix('torch.')} {proof.way}", []).append(proof)
    forms = set(groups)
    for proof in sorted(soft, key=lambda proof: proof.alpha):
        most = next(alpha for alpha in _ALPHAS if proof.alpha < alpha)
        groups.setdefault(f"alpha up to {most:.0f}", []).append(proof)
    rows, holds = [], True
    for name, proofs in groups.items():
        differences, ratios = [proof.relative for proof in proofs], [proof.tightness for proof in proofs]
        allowed = ALLOWED[proofs[0].dtype] if name in forms else None
        holds &= max(ratios) <= 1 and (allowed is None or max(differences) <= allowed)
        numbers = (f"{median(differences):.1e}", f"{max(differences):.1e}", f"{allowed:.0e}" if allowed else "")
        rows.append((name, str(len(proofs)), *numbers, f"{median(ratios):.2f}", f"{max(ratios):.2f}"))
    columns = ("heads", "cases", "difference", "at most", "allowed", "of its bound", "at most")
    print_table("Hard heads by dtype and form, soft ones by alpha: relative differences", columns, rows)
    print_text("All equal within what is allowed, and within their bounds." if holds else "A DIFFERENCE IS TOO LARGE.")
    return holds


def _prove_model(name: str, arguments: Arguments) -> bool:
    """Print the differences of a network's layers; return whether all are within their bounds."""
    import torch

    from attnconv.convert import compare, no_convolutions, recast
    from attnconv.layers import SelfAttention

    subject = Subject.load(name, arguments)
    network, images = subject.loaded.model, example_images(subject, arguments)
    twin = recast(network, alpha=arguments.alpha, fast=False)
    for layer in twin.modules():
        if isinstance(layer, SelfAttention):
            layer.backend = "structured"
    with torch.no_grad(), no_convolutions():
        twin(images)
    found = compare(network, twin, images)
    print_comparison(
        found, f"{subject.loaded.source} as attention through the softmax, on images {tuple(images.shape)}"
    )
    holds = all(row.bound is None or row.error <= row.bound for row in found.layers)
    print("Every layer is within its bound." if holds else "A LAYER EXCEEDS ITS BOUND.")
    return holds
