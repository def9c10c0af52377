"""Which attention modules of a model can have heads replaced, and what each of them is given.

A module qualifies where it attends once over an image's tokens, or over those of each of its windows, by parts of known
names (`attention_parts`), and computes what those parts say. Any other, as the pooling head of SigLIP with its one
query, is passed over with the reason.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, final

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attnconv._util.errors import bad
from attnconv.inspect.capture import visit_attention
from attnconv.inspect.module_adapters import attention_parts, first_tensor, projects, refuse_other_formula
from attnconv.inspect.score_modifiers import CallForm, ScoreTerms
from attnconv.inspect.shift_profiles import shift_profile
from attnconv.inspect.token_operator import TokenOperator
from attnconv.operators.base import AttentionOperator
from attnconv.surgery.head_kernel_fit import LayerTokens

ONCE = "must attend once over the tokens of an image in rows and columns, with class tokens before it alone"


@final
@dataclass(frozen=True, eq=False)
class PassResult:
    """What one pass shows of the attention modules of a model, by name.

    Attributes:
        tokens: Of those whose heads can be replaced: inputs, and where the tokens stand.
        constancy: How constant their heads are.
        calls: How those are called that are called in a known way.
        given: What they were given.
        made: What they gave.
        passed_over: Why the heads of the others cannot be replaced.
    """

    tokens: dict[str, LayerTokens] = field(default_factory=dict)
    constancy: dict[str, Tensor] = field(default_factory=dict)
    calls: dict[str, CallForm] = field(default_factory=dict)
    given: dict[str, tuple[Tensor, ScoreTerms]] = field(default_factory=dict)
    made: dict[str, Tensor] = field(default_factory=dict)
    passed_over: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def passing_over(self, name: str) -> Iterator[None]:
        """A module that is refused inside is not taken."""
        try:
            yield
        except ValueError as reason:
            self.tokens.pop(name, None)
            self.passed_over.setdefault(name, str(reason))


def replaceable(
    model: nn.Module,
    images: Tensor,
    *,
    layers: frozenset[str] | None,
    grid: Sequence[int] | None,
    prefix: int | None,
    options: Mapping[str, object],
) -> PassResult:
    """Run a model once, and tell what can be replaced from what cannot.

    Args:
        model: Any vision transformer.
        images: What it is given.
        layers: Names of the attention modules to look at; None for all.
        grid: As `visit_attention`.
        prefix: As `visit_attention`.
        options: Further arguments of its forward pass by name.

    Raises:
        ValueError: Nothing can be replaced, or not what `layers` names.
    """
    looked = PassResult()
    modules = dict(model.named_modules())

    def wanted(name: str) -> bool:
        return name not in looked.passed_over and (layers is None or name in layers)

    def visit(name: str, operator: AttentionOperator) -> None:
        name = _holder(name, modules)
        if not wanted(name):
            return
        with looked.passing_over(name):
            if name in looked.tokens:
                raise ValueError(bad(f"model.{name}", ONCE, "more than one call"))
            looked.tokens[name] = _layer_tokens(name, modules[name], looked.given.get(name), operator)
            looked.constancy[name] = shift_profile(operator).constancy

    def unreadable(name: str, reason: str) -> None:
        with looked.passing_over(name):
            kind = type(modules[name]).__name__
            requirement = "must have attention that can be read"
            raise ValueError(bad(f"model.{name}", requirement, kind, f"It is not: {reason}."))

    handles = [
        handle
        for name, module in modules.items()
        if projects(module) and wanted(name)
        for handle in _watch(name, module, looked)
    ]
    try:
        visit_attention(model, images, visit, grid=grid, prefix=prefix, options=options, unreadable=unreadable)
    finally:
        for handle in handles:
            handle.remove()
    for name, part in list(looked.tokens.items()):
        with looked.passing_over(name):
            first = part.of(slice(1))
            made = looked.made[name][: part.sequences]
            refuse_other_formula(part.attention, first.inputs, made, terms=first.terms, name=f"model.{name}")
    _check_layers(looked, layers, [name for name, module in modules.items() if projects(module)])
    return looked


def _check_layers(looked: PassResult, layers: frozenset[str] | None, projecting: Sequence[str]) -> None:
    """Refuse a model of which nothing can be replaced, and layers that cannot be."""
    wanted = looked.passed_over if layers is None and not looked.tokens else sorted(layers or ())
    for name in wanted:
        if name in looked.passed_over:
            raise ValueError(looked.passed_over[name])
        if name not in looked.tokens:
            known = ", ".join(projecting)
            raise ValueError(bad("layers", f"must name attention modules, as {known}", repr(name)))


def _watch(name: str, module: nn.Module, looked: PassResult) -> list[RemovableHandle]:
    """Keep what a module is given and what it gives."""

    def before(_module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        with looked.passing_over(name):
            form = CallForm.of(module)
            try:
                x, terms = form.read(args, named)
            except ValueError as reason:
                raise ValueError(f"model.{name}.{reason}") from reason
            looked.calls[name], looked.given[name] = form, (x.detach(), terms)

    def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        given, form = first_tensor(output), looked.calls.get(name)
        if given is not None and form is not None:
            looked.calls[name] = replace(form, pair=isinstance(output, tuple))
            looked.made[name] = (given if form.batch_first else given.transpose(0, 1)).detach()

    return [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]


def _layer_tokens(
    name: str, module: nn.Module, given: tuple[Tensor, ScoreTerms] | None, operator: AttentionOperator
) -> LayerTokens:
    """What a module was given and where its tokens stand; refused where they are not those of an image alone."""
    attention_parts(module, f"model.{name}")
    if not name:
        kind = type(module).__name__
        raise ValueError(bad("model", "must hold its attention in a module inside it", kind, "Wrap it in another."))
    if not isinstance(operator, TokenOperator) or len(operator.grid.sizes) != 2 or given is None:
        raise ValueError(bad(f"model.{name}", ONCE, type(module).__name__))
    if operator.suffix > 0:
        raise ValueError(bad(f"model.{name}", ONCE, f"{operator.suffix} tokens after it"))
    height, width = operator.grid.sizes if operator.window is None else operator.window
    x, terms = given
    if x.shape[1] != operator.prefix + height * width:
        requirement = f"must be given {operator.prefix} tokens before {height} x {width}"
        raise ValueError(bad(f"model.{name}", requirement, x.shape[1]))
    sequences = len(x) // operator.batch
    terms = terms.per_image(sequences, f"model.{name}")
    return LayerTokens(module, x, (height, width), operator.prefix, terms, sequences)


def _holder(name: str, modules: Mapping[str, nn.Module]) -> str:
    """The module that holds all parts; attention may run in a module inside it."""
    outer = name.rpartition(".")[0]
    return outer if outer and not projects(modules[name]) and projects(modules[outer]) else name
