"""Find the attention modules whose heads can be replaced, and record what each of them computes on given images.

A module qualifies if it attends once over the tokens of an image, or of each window, as its `attention_parts` say.
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
_ONCE = "must attend once over the tokens of an image in rows and columns, with only class tokens before it"
_BLOCK = 2**25  # numbers held at once


@final
@dataclass(frozen=True, eq=False)
class LayerTokens:
    """One attention module, its input and output, and where its tokens are in the image."""

    attention: nn.Module
    parts: AttentionParts
    inputs: Float[Tensor, "b n c"]  # b sequences; those of one image are consecutive
    outputs: Float[Tensor, "b n c"]
    grid: tuple[int, int]  # tokens of the image or of a window
    prefix: int  # number of tokens before them
    sequences: int  # number of sequences (windows) per image
    terms: ScoreTerms  # modifiers of its scores; of one image, or the same for all sequences
    call: CallForm
    constancy: Float[Tensor, "h"]  # `ShiftProfile.constancy`

    def of(self, images: slice) -> "LayerTokens":
        """The same for some of the images."""
        inputs, outputs = (
            each.unflatten(0, (-1, self.sequences))[images].flatten(0, 1) for each in (self.inputs, self.outputs)
        )
        return replace(self, inputs=inputs, outputs=outputs)

    def maps_and_values(self) -> tuple[Tensor, Tensor]:
        """Attention (b, h, n, n) and values (b, h, n, d) of all heads."""
        return self.parts.maps_and_values(self.inputs, self.terms)

    def blocks(self, kernel_size: int) -> Iterator["LayerTokens"]:
        """A few images at a time."""
        count, tokens, _ = self.inputs.shape
        wide = (kernel_size**2 + 1 + self.prefix) * self.parts.head_dim
        step = max(1, _BLOCK // (self.parts.heads * self.sequences * tokens * max(tokens, wide)))
        for start in range(0, count // self.sequences, step):
            yield self.of(slice(start, start + step))


def replaceable(
    model: nn.Module, images: Tensor, *, layers: Collection[str] | None, **reading: Any
) -> tuple[dict[str, LayerTokens], dict[str, str]]:
    """Run a model once; return the modules whose heads can be replaced, and the reason for each other module, by name.

    `layers` are the names to choose from, `reading` further arguments of `visit_attention`.
    """
    modules = dict(model.named_modules())
    calls: dict[str, list[tuple[Any, Any, Any]]] = {
        name: [] for name, module in modules.items() if projections(module) and (layers is None or name in layers)
    }
    placed: dict[str, list[Place | None]] = defaultdict(list)
    passed_over: dict[str, str] = {}

    def visit(name: str, operator: AttentionOperator) -> None:
        name = _holder(name, modules)
        if layers is None or name in layers:
            placed[name].append(_place(operator))

    def unreadable(name: str, reason: str) -> None:
        got = type(modules[name]).__name__
        passed_over[name] = bad(f"model.{name}", "must have readable attention", got, f"Reason: {reason}.")

    with ExitStack() as hooks:
        for name, recorded in calls.items():
            hook = modules[name].register_forward_hook(lambda _, *call, to=recorded: to.append(call), with_kwargs=True)
            hooks.enter_context(hook)
        visit_attention(model, images, visit, unreadable=unreadable, **reading)
    tokens: dict[str, LayerTokens] = {}
    for name in [name for name in placed if name not in passed_over]:
        try:
            tokens[name] = layer_tokens(name, modules[name], calls.get(name, []), placed[name])
        except ValueError as reason:
            passed_over[name] = str(reason)
    for name in layers or (() if tokens else passed_over):
        if name in passed_over:
            raise ValueError(passed_over[name])
        if name not in tokens:
            known = ", ".join(name for name, module in modules.items() if projections(module))
            raise ValueError(bad("layers", f"must name attention modules, as {known}", repr(name)))
    return tokens, passed_over


def relative_size(change: Float[Tensor, "*b"], size: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Return change / size, or 0 where nothing changes: heads and layers may output only zeros."""
    return (change / size).where(change > 0, 0.0)


def _place(operator: AttentionOperator) -> Place | None:
    """Where the tokens are; None if they are not those of an image in rows and columns."""
    if not isinstance(operator, TokenOperator) or len(operator.grid.sizes) != 2:
        return None
    height, width = operator.window or operator.grid.sizes
    return (height, width), operator.prefix, operator.batch, shift_profile(operator).constancy


def layer_tokens(
    name: str, module: nn.Module, calls: Sequence[tuple[Any, Any, Any]], placed: Sequence[Place | None]
) -> LayerTokens:
    """The record of one module; refused unless it attends over the tokens of an image, as its parts say."""
    where, kind = f"model.{name}", type(module).__name__
    if not name:
        fix = "Wrap it in another module."
        raise ValueError(bad("model", "must hold its attention in a module inside it", kind, fix))
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
        requirement = f"must be given {prefix} tokens before {height} x {width} and none after"
        raise ValueError(bad(where, requirement, x.shape[1]))
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
    """Raise a ValueError where |formula - output| is above |output| times the root of the dtype's epsilon."""
    kind, requirement = type(tokens.attention).__name__, "must compute what its parts define"
    try:
        rows, values = tokens.maps_and_values()
        expected = tokens.parts.finish(rows @ values)
    except RuntimeError as reason:
        raise ValueError(bad(name, requirement, f"{kind}, of parts that do not fit: {reason}", FIX)) from reason
    error, size = float((expected - tokens.outputs).norm()), float(tokens.outputs.norm())
    if not error <= torch.finfo(tokens.outputs.dtype).eps ** 0.5 * size:
        got = f"{kind}, whose output is {error / max(size, 1e-30):.2g} away from that of its parts"
        raise ValueError(bad(name, requirement, got, FIX))


def _holder(name: str, modules: Mapping[str, nn.Module]) -> str:
    """The module that holds all parts; attention may run in a module inside it."""
    outer = name.rpartition(".")[0]
    return outer if outer and not projections(modules[name]) and projections(modules[outer]) else name
