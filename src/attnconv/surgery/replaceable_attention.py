"""Discovery of the attention modules whose heads can be replaced, with their inputs and outputs on given images.

A module qualifies if it attends once to the tokens of an image, or of each window, by the formula in `module_adapters`.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv.inspect.capture import visit_attention
from attnconv.inspect.module_adapters import FIX, AttentionParts, attention_parts, first_tensor, projections
from attnconv.inspect.score_modifiers import CallForm, ScoreTerms
from attnconv.inspect.shift_profiles import shift_profile
from attnconv.inspect.token_operator import TokenOperator
from attnconv.operators.base import AttentionOperator

Place: TypeAlias = tuple[tuple[int, int], int, int, Tensor]  # grid, prefix, images, constancy
_ONCE = "must compute attention once over a two-dimensional grid of image tokens, preceded only by class tokens"
_BLOCK = 2**25  # elements in memory at once


@final
@dataclass(frozen=True, eq=False)
class LayerTokens:
    """One attention module with its inputs and outputs, and the positions of its tokens in the image."""

    attention: nn.Module
    parts: AttentionParts
    inputs: Float[Tensor, "b n c"]  # b sequences; those of one image are consecutive
    outputs: Float[Tensor, "b n c"]
    grid: tuple[int, int]  # number of tokens (height, width) of the image or of a window
    prefix: int  # number of tokens before the image tokens
    sequences: int  # number of sequences (windows) per image
    terms: ScoreTerms  # modifiers of the scores, for the sequences of one image or shared by all sequences
    call: CallForm
    constancy: Float[Tensor, "h"]  # `ShiftProfile.constancy`

    def of(self, images: slice) -> "LayerTokens":
        inputs, outputs = (
            each.unflatten(0, (-1, self.sequences))[images].flatten(0, 1) for each in (self.inputs, self.outputs)
        )
        return replace(self, inputs=inputs, outputs=outputs)

    def maps_and_values(self) -> tuple[Tensor, Tensor]:
        """Return attention (b, h, n, n) and values (b, h, n, d) of all heads."""
        return self.parts.maps_and_values(self.inputs, self.terms)

    def blocks(self) -> Iterator["LayerTokens"]:
        """Yield the tokens of a few images at a time."""
        count, tokens, _ = self.inputs.shape
        step = max(1, _BLOCK // (self.parts.heads * self.sequences * tokens * max(tokens, self.parts.head_dim)))
        for start in range(0, count // self.sequences, step):
            yield self.of(slice(start, start + step))


def replaceable(
    model: nn.Module, images: Tensor, *, layers: Collection[str] | None, **reading: Any
) -> tuple[dict[str, LayerTokens], dict[str, str]]:
    """Run a model once; return the modules whose heads can be replaced, and the reasons why the others do not qualify.

    `layers` are the names of the modules to choose from; None for all. `reading` holds options of `visit_attention`.
    """
    modules = dict(model.named_modules())
    calls: dict[str, list[tuple[Any, Any, Any]]] = {
        name: [] for name, module in modules.items() if projections(module) and (layers is None or name in layers)
    }
    placed: dict[str, list[Place | None]] = defaultdict(list)
    left_out: dict[str, str] = {}

    def visit(name: str, operator: AttentionOperator) -> None:
        name = _holder(name, modules)
        if layers is None or name in layers:
            placed[name].append(_place(operator))

    def unreadable(name: str, reason: str) -> None:
        got = type(modules[name]).__name__
        left_out[name] = bad(f"model.{name}", "must have readable attention", got, f"Reason: {reason}.")

    with ExitStack() as hooks:
        for name, recorded in calls.items():
            hook = modules[name].register_forward_hook(lambda _, *call, to=recorded: to.append(call), with_kwargs=True)
            hooks.enter_context(hook)
        visit_attention(model, images, visit, unreadable=unreadable, **reading)
    tokens: dict[str, LayerTokens] = {}
    for name in [name for name in placed if name not in left_out]:
        try:
            tokens[name] = layer_tokens(name, modules[name], calls.get(name, []), placed[name])
        except ValueError as reason:
            left_out[name] = str(reason)
    for name in layers or (() if tokens else left_out):
        if name in left_out:
            raise ValueError(left_out[name])
        if name not in tokens:
            known = ", ".join(name for name, module in modules.items() if projections(module))
            raise ValueError(bad("layers", f"must contain only attention modules, by name: {known}", repr(name)))
    return tokens, left_out


def relative_size(change: Float[Tensor, "*b"], size: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Return change / size, or 0 where the change is 0, since heads and layers may output only zeros."""
    return (change / size).where(change > 0, 0.0)


def _place(operator: AttentionOperator) -> Place | None:
    """Return the positions of the tokens; None if they are not on a two-dimensional grid."""
    if not isinstance(operator, TokenOperator) or len(operator.grid.sizes) != 2:
        return None
    height, width = operator.window or operator.grid.sizes
    return (height, width), operator.prefix, operator.batch, shift_profile(operator).constancy


def layer_tokens(
    name: str, module: nn.Module, calls: Sequence[tuple[Any, Any, Any]], placed: Sequence[Place | None]
) -> LayerTokens:
    """Return the recorded tokens of one module; raise a `ValueError` if its heads cannot be replaced."""
    where, kind = f"model.{name}", type(module).__name__
    if not name:
        fix = "Wrap the model in an outer module."
        raise ValueError(bad("model", "must contain its attention layers as submodules", kind, fix))
    if len(calls) > 1 or len(placed) > 1:
        raise ValueError(bad(where, _ONCE, "more than one call"))
    call, place = CallForm.of(module), placed[0]
    if not calls or place is None:
        raise ValueError(bad(where, _ONCE, kind))
    ((args, named, output),) = calls
    try:
        x, terms = call.read(args, named)
    except ValueError as reason:
        raise ValueError(f"{where}.{reason}") from reason
    (height, width), prefix, images, constancy = place
    made = first_tensor(output)
    assert made is not None
    if x.shape[1] != prefix + height * width:
        requirement = f"must get {prefix} (class tokens and registers) + {height} x {width} (image) tokens"
        raise ValueError(bad(where, requirement, f"{x.shape[1]} tokens"))
    made = made if call.batch_first else made.transpose(0, 1)
    sequences = len(x) // images
    tokens = LayerTokens(
        attention=module,
        parts=attention_parts(module, where),
        inputs=x.detach(),
        outputs=made.detach(),
        grid=(height, width),
        prefix=prefix,
        sequences=sequences,
        terms=terms.per_image(sequences, where),
        call=replace(call, pair=isinstance(output, tuple)),
        constancy=constancy,
    )
    refuse_other_formula(tokens.of(slice(1)), where)
    return tokens


@torch.no_grad()
def refuse_other_formula(tokens: LayerTokens, name: str = "attention") -> None:
    """Raise a `ValueError` if |formula - output| exceeds |output| times the square root of the dtype's epsilon."""
    kind, requirement = type(tokens.attention).__name__, "must compute the attention that its parts define"
    try:
        rows, values = tokens.maps_and_values()
        expected = tokens.parts.finish(rows @ values)
    except RuntimeError as reason:
        raise ValueError(bad(name, requirement, f"{kind}, with an unknown formula: {reason}", FIX)) from reason
    error, size = float((expected - tokens.outputs).norm()), float(tokens.outputs.norm())
    if not error <= torch.finfo(tokens.outputs.dtype).eps ** 0.5 * size:
        got = f"{kind}, whose output differs by {error / max(size, 1e-30):.2g} (relative) from that of its parts"
        raise ValueError(bad(name, requirement, got, FIX))


def _holder(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the name of the module that contains all parts, since attention may run in one of its submodules."""
    outer = name.rpartition(".")[0]
    return outer if outer and not projections(modules[name]) and projections(modules[outer]) else name
