"""`attnconv prove [MODEL]`: compare convolutions with equivalent attention layers."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from attnconv._util.settings import Fine, Natural, Positive, Problem
from attnconv.cli.image_inputs import ImageOptions, Subject, example_images
from attnconv.cli.output import print_comparison, print_table, print_text
from attnconv.cli.parsing import Positional

if TYPE_CHECKING:
    from attnconv.convert.verify_conversions import Proof

_ALPHAS = (1.0, 3.0, 10.0, 20.1)  # upper limits of alpha in the groups of soft heads


@dataclass(frozen=True, kw_only=True)
class Arguments(ImageOptions):
    """Verify Theorem 1 of the paper: compare convolutions with equivalent attention layers.

    Random convolutions are computed by attention with hard heads, in which each query attends to one key, using three
    algorithms: a dense softmax, one softmax per axis (kronecker), and shifts of the input. Further random convolutions
    are approximated by soft heads, which attend to several keys, and the errors are compared with their bounds. The
    reference is the convolution in float64. If MODEL is given, that network is instead compared layer by layer with its
    recast version, whose attention uses one softmax per axis. Both run in the network's dtype. While attention is
    computed with a softmax, PyTorch's convolutions are disabled, so that they cannot produce the result.

    Examples:
        attnconv prove
        attnconv prove --cases 2000 --seed 1
        attnconv prove torchvision:resnet18 --pretrained --data PATH/TO/IMAGES
        attnconv prove my_package.models:network --image-size 64 --alpha 6

    Attributes:
        model: Network to recast and compare: preset, run folder, weights file, hub:OWNER/NAME, timm:NAME, hf:NAME,
            torchvision:NAME or package.module:function. Without MODEL, random convolutions are compared.
        cases: Number of random convolutions for each kind of head (hard, soft). Stride, padding and so on are random.
        seed: Seed of the random convolutions.
        alpha: Sharpness of the recast network's heads, in 1 / position^2. By default, heads are hard.
    """

    model: Positional[str | None] = None
    cases: Natural = 200
    seed: int = 0
    alpha: Positive | None = None

    def conflicts(self, _: Fine) -> Iterator[Problem]:
        of_model = ("data", "data_root", "images", "image_size", "skip_broken", "pretrained", "alpha")
        for name in of_model if self.model is None else ("cases", "seed"):
            if getattr(self, name) != getattr(Arguments, name):
                yield Problem(name, f"must be omitted {'without' if self.model is None else 'with'} MODEL")


def run(arguments: Arguments) -> int:
    """Compare random convolutions or a network; return status 1 if a tolerance or bound is exceeded."""
    holds = _prove_cases(arguments) if arguments.model is None else _prove_model(arguments.model, arguments)
    return 0 if holds else 1


def _prove_cases(arguments: Arguments) -> bool:
    """Print differences by algorithm and sharpness; return whether all are within tolerance and bounds."""
    from attnconv.convert.verify_conversions import ALLOWED, WAYS, prove
    from attnconv.training.progress_bars import tracked

    cases, seed = arguments.cases, arguments.seed
    hard = tracked(prove(cases, seed=seed), "Hard heads", cases * len(WAYS))
    soft = tracked(prove(cases, seed=seed, soft=True), "Soft heads", cases)
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
        # `max` would hide NaN.
        holds &= all(one <= 1 for one in ratios) and (allowed is None or all(one <= allowed for one in differences))
        numbers = (f"{median(differences):.1e}", f"{max(differences):.1e}", f"{allowed:.0e}" if allowed else "")
        rows.append((name, str(len(proofs)), *numbers, f"{median(ratios):.2f}", f"{max(ratios):.2f}"))
    columns = ("heads", "cases", "median", "maximum", "tolerance", "median/bound", "max/bound")
    print_table("Relative differences of hard heads by dtype and algorithm, and of soft heads by alpha", columns, rows)
    print_text("All differences are within tolerance and bounds." if holds else "A DIFFERENCE EXCEEDS ITS LIMIT.")
    return holds


def _prove_model(name: str, arguments: Arguments) -> bool:
    """Print the differences of a network layer by layer; return whether all are within their bounds."""
    import torch

    from attnconv.convert import compare, no_convolutions, recast
    from attnconv.layers import SelfAttention
    from attnconv.training.progress_bars import working

    subject = Subject.load(name, arguments)
    network, images = subject.loaded.model, example_images(subject, arguments)
    twin = recast(network, alpha=arguments.alpha, fast=False)
    for layer in twin.modules():
        if isinstance(layer, SelfAttention):
            layer.backend = "structured"
    with working(f"Comparing {name} with attention"):
        with torch.no_grad(), no_convolutions():
            twin(images)
        found = compare(network, twin, images)
    print_comparison(found, f"{subject.loaded.source} computed by attention, on images {tuple(images.shape)}")
    holds = all(row.bound is None or row.error <= row.bound for row in found.layers)
    print("Every layer is within its bound." if holds else "A LAYER EXCEEDS ITS BOUND.")
    return holds
