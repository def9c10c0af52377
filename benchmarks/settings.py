"""What each benchmark measures, as settings; importing this file costs no torch.

The defaults are the sizes at which the library's claims are made. `QUICK` asks the same questions of small sizes within
seconds: it shows that everything runs, and its numbers say nothing about the claims. Memory is measured once there:
each process that does so takes seconds to start.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias

from attnconv._util.errors import bad

DtypeName: TypeAlias = Literal["float32", "bfloat16"]
QUESTIONS: Mapping[str, str] = {
    "position-only": "How fast and lean is a position-only layer beside the formula it computes?",
    "model-step": "What does attention add to a training step of the paper's model?",
    "megapixel": "How do time and memory of full attention grow up to a megapixel?",
    "full-covariance": "What does a full covariance cost, which does not factor over the axes?",
    "hard-heads": "What does a convolution cost as hard attention heads?",
    "relative-bias": "What does a learned relative bias cost beside content?",
    "gated": "What does ConViT's gated positional attention cost?",
    "planner": "Does the planner choose well?",
}


@dataclass(frozen=True)
class PositionOnlySettings:
    """One layer, forward and backward, against the softmax of all scores."""

    cases: tuple[tuple[int, int], ...] = ((32, 16), (32, 32), (4, 64))
    """Pairs of batch and side of the images."""
    channels: tuple[int, ...] = (64, 400)
    """Channels in and out."""
    wide_to: int = 32
    """Largest side that is measured with more than 64 channels."""
    heads: int = 9
    """Number of heads."""
    dtypes: tuple[DtypeName, ...] = ("float32", "bfloat16")
    """float32, or autocast to bfloat16."""
    memory_from: int = 32
    """Smallest side whose peak memory is measured too."""
    repeats: int = 7
    """Timed rounds."""


@dataclass(frozen=True)
class ModelStepSettings:
    """One training step with SGD, against the same step with each head's mixed values stored."""

    preset: str = "quadratic"
    """Name of the model: one whose attention does not look at content."""
    batch: int = 32
    """Images in a step."""
    dtypes: tuple[DtypeName, ...] = ("float32", "bfloat16")
    """float32, or autocast to bfloat16."""
    repeats: int = 5
    """Timed rounds."""


@dataclass(frozen=True)
class MegapixelSettings:
    """Forward pass of one layer over one square image."""

    sides: tuple[int, ...] = (128, 256, 512, 1024)
    """Sides of the images, at least two."""
    alphas: tuple[float, ...] = (0.5, 0.001)
    """Sharpness of the heads in 1 / pixel^2: local and wide."""
    channels: int = 64
    """Channels in and out."""
    heads: int = 9
    """Number of heads."""
    memory_from: int = 1
    """Smallest side whose peak memory is measured too, each time in a process of its own."""
    repeats: int = 3
    """Timed rounds."""


@dataclass(frozen=True)
class FullCovarianceSettings:
    """One layer of the generalised quadratic encoding, forward and backward, against making all rows."""

    cases: tuple[tuple[int, int], ...] = ((32, 16), (8, 32), (2, 48), (1, 64), (1, 128), (1, 256))
    """Pairs of batch and side of the images, of at least two sides."""
    peers_to: int = 64
    """Largest side at which the other forms are measured too."""
    roots: tuple[float, ...] = (1.0, 0.1)
    """Factors on the roots of the precisions: local heads and wide ones."""
    channels: int = 64
    """Channels in and out."""
    heads: int = 9
    """Number of heads."""
    memory_from: int = 1
    """Smallest side whose peak memory is measured too, each time in a process of its own."""
    repeats: int = 5
    """Timed rounds."""


@dataclass(frozen=True)
class HardHeadsSettings:
    """Every distinct convolution of ResNet-18, as a planned layer and as itself."""

    batch: int = 32
    """Images at once."""
    side: int = 224
    """Side of the network's images; a multiple of 32."""
    repeats: int = 9
    """Timed rounds."""


@dataclass(frozen=True)
class RelativeBiasSettings:
    """Content and learned relative positions, forward and backward, against the bias materialised."""

    cases: tuple[tuple[int, int], ...] = ((16, 14), (4, 24), (4, 32), (2, 48), (1, 64))
    """Pairs of batch and side of the images."""
    heads: int = 4
    """Number of heads."""
    channels: int = 32
    """Channels of each head's queries, keys and values."""
    dtypes: tuple[DtypeName, ...] = ("float32",)
    """Of queries, keys and values; the tables are float32."""
    memory_from: int = 1
    """Smallest side whose peak memory is measured too, each time in a process of its own."""
    repeats: int = 7
    """Timed rounds."""


@dataclass(frozen=True)
class GatedSettings:
    """One layer of gated positional attention, forward and backward, against its two softmaxes materialised."""

    cases: tuple[tuple[int, int], ...] = ((16, 14), (8, 24), (4, 32), (1, 48))
    """Pairs of batch and side of the images, in tokens."""
    heads: int = 4
    """Number of heads."""
    channels: int = 48
    """Channels of each head."""
    memory_from: int = 1
    """Smallest side whose peak memory is measured too, each time in a process of its own."""
    repeats: int = 7
    """Timed rounds."""


@dataclass(frozen=True)
class PlannerSettings:
    """The planner's choice against the better of the two forms."""

    sides: tuple[int, ...] = (4, 8, 12, 16, 32)
    """Sides of the images."""
    channels: tuple[int, ...] = (16, 128)
    """Channels in and out."""
    batches: tuple[int, ...] = (1, 16)
    """Images at once."""
    dtypes: tuple[DtypeName, ...] = ("float32", "bfloat16")
    """float32, or autocast to bfloat16."""
    repeats: int = 9
    """Timed rounds."""


@dataclass(frozen=True)
class BenchSettings:
    """The settings of all."""

    position_only: PositionOnlySettings = field(default_factory=PositionOnlySettings)
    model_step: ModelStepSettings = field(default_factory=ModelStepSettings)
    megapixel: MegapixelSettings = field(default_factory=MegapixelSettings)
    full_covariance: FullCovarianceSettings = field(default_factory=FullCovarianceSettings)
    hard_heads: HardHeadsSettings = field(default_factory=HardHeadsSettings)
    relative_bias: RelativeBiasSettings = field(default_factory=RelativeBiasSettings)
    gated: GatedSettings = field(default_factory=GatedSettings)
    planner: PlannerSettings = field(default_factory=PlannerSettings)


QUICK = BenchSettings(
    PositionOnlySettings(cases=((2, 8), (1, 16)), channels=(16,), memory_from=17, dtypes=("float32",), repeats=2),
    ModelStepSettings(preset="quadratic-digits", batch=4, dtypes=("float32",), repeats=2),
    MegapixelSettings(sides=(32, 64), alphas=(0.5,), channels=8, memory_from=64, repeats=2),
    FullCovarianceSettings(cases=((2, 8), (1, 16)), roots=(1.0,), channels=8, heads=3, memory_from=17, repeats=2),
    HardHeadsSettings(batch=2, side=32, repeats=2),
    RelativeBiasSettings(cases=((1, 6), (2, 8)), heads=2, channels=8, memory_from=9, repeats=2),
    GatedSettings(cases=((1, 6), (2, 8)), heads=2, channels=8, memory_from=9, repeats=2),
    PlannerSettings(sides=(4, 8), channels=(8,), batches=(2,), dtypes=("float32",), repeats=3),
)


def problems(settings: BenchSettings) -> list[str]:
    """Everything that is wrong, in the spelling of the flags."""
    step, wide, hard = settings.model_step, settings.megapixel, settings.hard_heads
    layer, bias, plan = settings.position_only, settings.relative_bias, settings.planner
    full, gated = settings.full_covariance, settings.gated
    wrong = [
        bad(flag, "must be at least 1", value)
        for flag, value in (
            ("--position-only.heads", layer.heads),
            ("--position-only.repeats", layer.repeats),
            *(("--position-only.cases", number) for case in layer.cases for number in case),
            *(("--position-only.channels", channels) for channels in layer.channels),
            ("--model-step.batch", step.batch),
            ("--model-step.repeats", step.repeats),
            *(("--megapixel.sides", side) for side in wide.sides),
            ("--megapixel.channels", wide.channels),
            ("--megapixel.heads", wide.heads),
            ("--megapixel.repeats", wide.repeats),
            *(("--relative-bias.cases", number) for case in bias.cases for number in case),
            ("--relative-bias.heads", bias.heads),
            ("--relative-bias.channels", bias.channels),
            ("--relative-bias.repeats", bias.repeats),
            *(("--gated.cases", number) for case in gated.cases for number in case),
            ("--gated.heads", gated.heads),
            ("--gated.channels", gated.channels),
            ("--gated.repeats", gated.repeats),
            *(("--planner.sides", side) for side in plan.sides),
            *(("--planner.channels", channels) for channels in plan.channels),
            *(("--planner.batches", batch) for batch in plan.batches),
            ("--planner.repeats", plan.repeats),
            *(("--full-covariance.cases", number) for case in full.cases for number in case),
            ("--full-covariance.channels", full.channels),
            ("--full-covariance.heads", full.heads),
            ("--full-covariance.repeats", full.repeats),
            ("--hard-heads.batch", hard.batch),
            ("--hard-heads.repeats", hard.repeats),
        )
        if value < 1
    ]
    if len(set(wide.sides)) < 2:
        wrong.append(bad("--megapixel.sides", "must be at least two different sides", wide.sides))
    wrong += [
        bad(f"--{question.name}.{entry.name}".replace("_", "-"), "must not be empty", "nothing")
        for question in fields(settings)
        for entry in fields(getattr(settings, question.name))
        if getattr(getattr(settings, question.name), entry.name) == ()
    ]
    if len({side for _, side in full.cases}) < 2:
        wrong.append(bad("--full-covariance.cases", "must hold at least two different sides", full.cases))
    wrong += [bad("--full-covariance.roots", "must be positive", root) for root in full.roots if not root > 0]
    wrong += [bad("--megapixel.alphas", "must be positive", alpha) for alpha in wide.alphas if not alpha > 0]
    if hard.side < 32 or hard.side % 32:
        wrong.append(bad("--hard-heads.side", "must be a positive multiple of 32", hard.side))
    return wrong
