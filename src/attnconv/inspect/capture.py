"""Read the attention of any model, one layer at a time, with hooks and intercepted calls (`attention_calls`).

No attention is skipped silently: attention that cannot be read raises an error with the module's name, as does a module
that is named like attention but makes no attention call.
"""

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from attnconv._util.errors import bad
from attnconv._util.module_state import evaluating
from attnconv._util.value_checks import check_dense, check_module, check_tensor, is_index, whole
from attnconv.inspect.attention_calls import AttentionCalls, TokenRows, UnreadableError, gated_rows, map_rows
from attnconv.inspect.position_codes import PositionCodes
from attnconv.inspect.token_layout import layout_of
from attnconv.inspect.token_operator import TokenOperator
from attnconv.inspect.token_positions import TokenPositions, at_queries
from attnconv.layers.gated_positional import GatedPositionalAttention
from attnconv.layers.self_attention import SelfAttention
from attnconv.operators.base import AttentionOperator
from attnconv.operators.dense import Dense

# timm's modules whose fused attention subtracts the outputs of two calls.
DIFFERENCES = ("DiffAttention", "DiffParallelScalingBlock")

HEADS = ("num_heads", "num_attention_heads", "heads", "n_heads", "n_head")  # attributes with the number of heads

# Errors that this library raises about an argument; all other errors in a forward pass come from the model.
_OWN_ERRORS = re.compile(r"(images|model(\.\S*)?|layers|grid|prefix|queries|options|kernel_size|position_length): ")
_OTHER_ARGUMENTS = re.compile("unexpected keyword|missing .* required")


def visit_attention(
    model: nn.Module,
    images: Tensor,
    visit: Callable[[str, AttentionOperator], None],
    *,
    grid: Sequence[int] | None = None,
    prefix: int | None = None,
    layers: Collection[str] | None = None,
    options: Mapping[str, object] | None = None,
    unreadable: Callable[[str, str], object] | None = None,
) -> None:
    """Run a model once and call a function with the operator of each attention layer, just before the layer runs.

    Supports layers from this library, vision transformers from timm, torchvision and Hugging Face,
    nn.MultiheadAttention, and all modules that call PyTorch's attention functions, or that multiply values with maps
    computed from products of queries and keys. The operator of a layer from another library is a `TokenOperator`.
    Errors in the forward pass propagate unchanged.

    Args:
        model: Any module. It runs in evaluation mode and without gradients; its mode is restored.
        images: Input of the model: images, (b, c, height, width), or their tokens, (b, tokens, channels).
        visit: Function that is called with the name and the operator of each layer, in the order in which they run.
        grid: Tokens along each axis, (height, width). Needed only if `images` are tokens, or if an operation makes it
            impossible to follow their positions from the images.
        prefix: With `grid`, the number of class tokens and registers before the image's tokens; needed if there is more
            than one other token. The others follow the image's tokens.
        layers: Names of the modules to read; None for all. Other modules are ignored.
        options: Additional keyword arguments for the model's forward pass, such as `interpolate_pos_encoding`.
        unreadable: Called with a layer's name and the reason if it cannot be read; None raises. Ignored with `layers`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If attention cannot be read, no layer runs, one of `layers` does not run, or `options` is rejected.

    Example:
        >>> block = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=8, batch_first=True)
        >>> def visit(name: str, operator: AttentionOperator) -> None:
        ...     print(name, operator.grid.sizes, tuple(operator.rows(torch.tensor([0, 5])).shape))
        >>> visit_attention(block, torch.zeros(1, 12, 8), visit, grid=(3, 4))
        self_attn (3, 4) (1, 2, 2, 12)
    """
    check_module(model)
    check_tensor(images)
    for name, function in (("visit", visit), ("unreadable", unreadable)):
        if not callable(function) and (name == "visit" or function is not None):
            raise TypeError(bad(name, "must be a function", type(function).__name__))
    _check_arguments(grid, prefix, layers)
    call_options = checked_options(model, images, options)

    def look(name: str, operator: AttentionOperator) -> None:
        visit(name, operator)

    with (
        torch.inference_mode(False),
        torch.no_grad(),
        evaluating(model),
        changing_attention(model, look, grid=grid, prefix=prefix, layers=layers, unreadable=unreadable),
    ):
        model(images, **call_options)


@contextmanager
def changing_attention(
    model: nn.Module,
    change: Callable[[str, AttentionOperator], Tensor | None],
    *,
    grid: Sequence[int] | None,
    prefix: int | None,
    layers: Collection[str] | None,
    unreadable: Callable[[str, str], object] | None = None,
) -> Iterator[None]:
    """Call a function with the operator of each attention layer that runs in the `with` block.

    If it returns probabilities, the layer uses them instead of its own: `to_dense()` of an operator of this library,
    `token_rows()` of a `TokenOperator`. The arguments and errors are those of `visit_attention`.
    """
    sizes, names = None if grid is None else tuple(grid), None if layers is None else frozenset(layers)
    state = _Visit(change, sizes, prefix, names, unreadable if layers is None else None)
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            state.watch(name, module, hooks)
        try:
            with uncompiled(model), state.positions, AttentionCalls(state.positions, state.call):
                yield
        except Exception:
            state.raise_refusal()  # a later error would hide it
            raise
    if state.images:  # the model ran
        state.check(model)


def attention_operators(model: nn.Module, images: Tensor) -> dict[str, AttentionOperator]:
    """Return the operators of all attention layers of a model, by layer name, in the order in which the layers run.

    If attention depends on content, operators store the queries and keys of every image; to save memory, or for models
    without fused attention, use `visit_attention`. For a layer that runs several times, the last operator is kept.

    Args:
        model: Any module that `visit_attention` can read.
        images: Input of the model, (b, c, height, width).

    Raises:
        TypeError: If `model` is not a module, or `images` is not a tensor.
        ValueError: If an attention layer cannot be read, no attention layer runs, or the model rejects `images`.

    Example:
        >>> from attnconv import SelfAttention2d
        >>> layer = SelfAttention2d(3, 4, heads=2)
        >>> operators = attention_operators(nn.Sequential(layer, nn.ReLU()), torch.zeros(1, 3, 5, 6))
        >>> {name: operator.grid.sizes for name, operator in operators.items()}
        {'0': (5, 6)}
    """
    found: dict[str, AttentionOperator] = {}
    with blaming_images(model, images):
        visit_attention(model, images, found.__setitem__)
    return found


def _check_arguments(grid: object, prefix: object, layers: Any) -> None:
    if grid is not None and not (isinstance(grid, Sequence) and all(is_index(size) for size in grid)):
        raise TypeError(bad("grid", "must be a tuple of integers, (height, width), or None", repr(grid)))
    if prefix is not None:
        whole("prefix", prefix, 0)
    names = isinstance(layers, Collection) and not isinstance(layers, str)
    if layers is not None and not (names and all(isinstance(name, str) for name in layers)):
        raise TypeError(bad("layers", "must be a list of names, or None", repr(layers)))


def checked_options(model: nn.Module, images: Tensor, options: Any) -> dict[str, object]:
    """Check a model's keyword arguments (or None) against the signature of its forward pass; return them as a dict."""
    if options is not None and not (isinstance(options, Mapping) and all(isinstance(name, str) for name in options)):
        raise TypeError(bad("options", "must be a mapping from names to values, or None", repr(options)))
    given: dict[str, object] = {} if options is None else dict(options)
    try:
        signature = inspect.signature(model.forward)
    except ValueError:  # a scripted module has no signature
        return given
    try:
        signature.bind(images, **given)
    except TypeError as error:
        requirement = f"must be keyword arguments of the forward pass of {type(model).__name__}"
        raise ValueError(bad("options", requirement, ", ".join(given) or "none", f"Reason: {error}.")) from error
    return given


def check_images(images: Tensor, *, least: int = 1, before: int = 0, shape: tuple[int, ...] | None = None) -> None:
    """Raise an error unless images are finite, not constant and of `shape`; the first one has the index `before`."""
    check_dense(images, least=least)
    if shape is not None and tuple(images.shape[1:]) != shape:
        got = f"{tuple(images.shape[1:])} after {shape}"
        raise ValueError(bad("images", "must all have the same shape", got, "Crop or resize them to the same size."))
    if broken := _indices(~images.flatten(1).isfinite().all(1), before):
        raise ValueError(bad("images", "must be finite", f"NaN or infinity in image {broken} (counted from 0)"))
    # Constant means constant in each channel; images of a single pixel are accepted.
    pixels = images.flatten(2) if images.dim() > 3 else images.flatten(1)[:, None]
    constant = (pixels == pixels[..., :1]).flatten(1).all(1) & (pixels.shape[-1] > 1)
    if blank := _indices(constant, before):
        fix = "Attention on a constant image says nothing about the model. Pass real images."
        raise ValueError(bad("images", "must not be constant", f"equal values in image {blank} (counted from 0)", fix))


@contextmanager
def blaming_images(model: nn.Module, images: Tensor, options: Mapping[str, object] | None = None) -> Iterator[None]:
    """Re-raise errors of a model's forward pass as errors about `images`, or `options` if `forward` rejects them.

    Errors that this library raises about an argument are not changed.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, ValueError | TypeError) and _OWN_ERRORS.match(str(error)):
            raise
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        also = f" with the options {', '.join(options)}" if options else ""
        requirement = f"must be accepted by the forward pass of {type(model).__name__}{also}"
        argument, got = "images", f"a batch of shape {tuple(images.shape)}"
        if isinstance(error, TypeError) and _OTHER_ARGUMENTS.search(reason):  # a submodule received the arguments
            argument, got = "options", ", ".join(options or ()) or "none"
        raise ValueError(bad(argument, requirement, got, f"The model raised: {reason}.")) from error


def _indices(flags: Tensor, before: int) -> str:
    """Format the indices of the flagged images, at most five of them; empty if there are none."""
    numbers = [before + index for index in flags.nonzero().flatten().tolist()]
    return ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")


def uncompiled(model: nn.Module) -> AbstractContextManager[object]:
    """Return a context manager in which compiled modules run eagerly, since compiled code does not call hooks."""
    compiled = any(
        type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


@final
@dataclass
class _Running:
    """A module whose forward pass is running."""

    name: str  # in the model
    module: nn.Module
    arguments: tuple[Any, ...]  # positional, then by name
    calls: int = 0  # number of attention calls so far
    paused: AbstractContextManager[None] | None = None  # while a layer of this library runs


@final
@dataclass(eq=False)
class _Visit:
    """State of one visit: the modules that are running, and the layers read or rejected so far."""

    visit: Callable[[str, AttentionOperator], Tensor | None]
    grid: tuple[int, ...] | None
    prefix: int | None
    layers: frozenset[str] | None
    unreadable: Callable[[str, str], object] | None
    images: int = 0  # number of images; 0 before the model runs
    refused: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    seen: dict[str, None] = field(default_factory=dict)  # in the order in which they run
    present: dict[str, None] = field(default_factory=dict)  # names of all attention modules, in the same order
    running: list[_Running] = field(default_factory=list)
    visiting: bool = False  # whether `visit` is running; the calls that it makes are ignored
    positions: TokenPositions = field(init=False)

    def __post_init__(self) -> None:
        self.positions = TokenPositions(self.product)

    def _start(self, images: Tensor) -> None:
        """Set the positions of the input of the model, or of a submodule that is called outside its forward pass."""
        self.images = len(images)
        if images.dim() > 3:
            self.positions.start(images)
        elif images.dim() == 3 and self.grid is not None:
            self.positions.start(images, self.grid, self._before(images.shape[1], tuple(images.shape)))

    def _before(self, tokens: int, shape: tuple[int, ...]) -> int:
        """Return the number of tokens before those of the given grid."""
        assert self.grid is not None
        others = tokens - math.prod(self.grid)
        if others < (self.prefix or 0):
            requirement = f"must have at least {math.prod(self.grid) + (self.prefix or 0)} tokens for grid={self.grid}"
            got = f"{tokens} tokens in a tensor of shape {shape}"
            raise ValueError(bad("images", requirement, got, "Tokens must have the shape (batch, tokens, channels)."))
        if others > 1 and self.prefix is None:
            requirement = (
                f"must be given, since {others} of the {tokens} tokens are not in the grid of size {self.grid}"
            )
            raise ValueError(bad("prefix", requirement, None))
        return others if self.prefix is None else self.prefix

    def watch(self, name: str, module: nn.Module, hooks: ExitStack) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            if self.layers is None:
                self._refuse(name, module, "it is a scripted module, whose calls cannot be intercepted")
            return
        begin, end = partial(self._begin, name), partial(self._end, name)
        hooks.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
        hooks.enter_context(module.register_forward_hook(end, always_call=True))

    def _begin(self, name: str, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self.visiting:
            return
        frame = _Running(name, module, (*args, *named.values()))
        if not self.running:
            images = next((each for each in frame.arguments if isinstance(each, Tensor) and each.dim() > 0), None)
            if images is not None and (name == "" or self.positions.of(images) is None):
                self._start(images)
        self.running.append(frame)
        reason = getattr(module, "attention_unreadable", None)
        if reason is not None and self._wanted(name):
            self._refuse(name, module, reason)
        if isinstance(module, SelfAttention) and not self.positions.paused:  # not inside another one
            frame.calls = 1
            frame.paused = self.positions.pause()
            frame.paused.__enter__()
            if self._wanted(name):
                operator = module.operator(frame.arguments[0])
                rows = self._hand_over(name, operator)
                if rows is not None:
                    module._operator = lambda *_: Dense(operator.grid, rows)  # type: ignore[method-assign]

    def _end(self, name: str, module: nn.Module, _: object, output: object) -> None:
        if self.visiting or not self.running:  # not running: after an error in `start`
            return
        frame = self.running.pop()
        before = self.positions.of(frame.arguments[0]) if frame.arguments else None
        if frame.paused is not None:
            frame.paused.__exit__(None, None, None)
            vars(module).pop("_operator", None)
            if isinstance(module, SelfAttention) and before is not None and output is not None:
                grid = module.grid(before.codes.shape[2:])
                self.positions.put(output, at_queries(self.positions.codes, before, grid))
        if isinstance(module, GatedPositionalAttention) and before is not None and output is not None:
            self.positions.put(output, before)  # products with its factors cannot be followed
        if self.running:
            self.running[-1].calls += frame.calls
        # After an error there is no output; do not hide that error behind a different one.
        silent = output is not None and frame.calls == 0 and not self.positions.paused
        if silent and type(module).__name__.lower().endswith(("attention", "attn")) and self._wanted(name):
            self._refuse(name, module, "its attention was not found: it has no product of attention maps and values")

    def product(self, maps: Tensor, queries: Tensor | None, keys: Tensor | None, reason: str) -> Tensor | None:
        """Read attention that the model computes itself, before its product with the values."""

        def read() -> TokenRows:
            if reason:
                raise UnreadableError(reason)
            return map_rows(maps)

        return self.call(read, queries, keys)

    def call(self, read: Callable[[], TokenRows], queries: Tensor | None, keys: Tensor | None) -> Tensor | None:
        """Read an attention call that is about to run, and return other probabilities for it, if there are any."""
        if not self.running:
            return None
        frame = self.running[-1]
        frame.calls += 1
        if not self._wanted(frame.name) or frame.name in self.refused:
            return None
        try:
            if type(frame.module).__name__ in DIFFERENCES:
                raise UnreadableError("its attention is the difference of two softmaxes")
            rows = _with_gate(frame, read())
            codes = self.positions.codes
            if queries is None and keys is None:
                if self.grid is None or rows.sequences % self.images or rows.queries != rows.keys:
                    raise UnreadableError(self.positions.why())
                codes = PositionCodes(self.grid)
                before = self._before(rows.keys, (rows.sequences, rows.keys))
                tokens = codes.of_tokens(self.images, rows.keys, before, rows.device)
                queries = keys = tokens.repeat_interleave(rows.sequences // self.images, 0)
            if queries is None:  # such as the learned query of attention pooling
                queries = codes.of_others(rows.sequences, rows.queries, rows.device)
            if keys is None:
                keys = codes.of_others(rows.sequences, rows.keys, rows.device)
            operator = TokenOperator(rows, layout_of(codes, queries, keys, self.images))
            heads = next((each for name in HEADS if isinstance(each := getattr(frame.module, name, None), int)), None)
            if heads is not None and operator.heads > heads:
                raise UnreadableError(
                    f"it computes {operator.heads} attention maps per query, but its number of heads is {heads}"
                )
        except UnreadableError as error:
            self._refuse(frame.name, frame.module, str(error))
            return None
        other = self._hand_over(frame.name, operator)
        operator.release()
        return other

    def _wanted(self, name: str) -> bool:
        self.present[name] = None
        return self.layers is None or name in self.layers

    def _hand_over(self, name: str, operator: AttentionOperator) -> Tensor | None:
        self.seen[name] = None
        if self.refused and self.unreadable is None:  # the rest of the pass only collects names for the error
            return None
        self.visiting = True
        try:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return self.visit(name, operator)
        finally:
            self.visiting = False

    def _refuse(self, name: str, module: nn.Module, reason: str) -> None:
        """Record attention that cannot be read; the forward pass continues, to find the layers that can be read."""
        if name in self.refused:
            return
        self.refused[name] = (module, reason)
        if self.running:
            self.running[-1].calls += 1  # so that its parents do not report that they make no attention call
        if self.unreadable is not None:
            self.unreadable(name, reason)

    def raise_refusal(self) -> None:
        """Raise an error for the first rejected module, unless there is an `unreadable` callback."""
        if not self.refused or self.unreadable is not None:
            return
        name, (module, reason) = next(iter(self.refused.items()))
        fix = f"It cannot be read because {reason}."
        if readable := [name for name in self.seen if name not in self.refused]:
            fix += f" To read the others, pass layers={list(readable)}."
        requirement = f"the attention of module {name!r} must be readable"
        raise ValueError(bad("model", requirement, type(module).__name__, fix))

    def check(self, model: nn.Module) -> None:
        """Raise an error if no attention ran, or if a requested layer did not."""
        self.raise_refusal()
        if missing := sorted((self.layers or frozenset()) - self.seen.keys()):
            requirement = "must be names of modules that compute attention"
            fix = f"Names of all attention modules: {', '.join(self.present) or 'none'}."
            raise ValueError(bad("layers", requirement, repr(missing), fix))
        if not self.seen and not self.refused:
            fix = (
                "It ran no layer from this library, no attention function of PyTorch and no product of maps and values."
            )
            raise ValueError(bad("model", "must contain an attention layer", type(model).__name__, fix))


def _with_gate(frame: _Running, rows: TokenRows) -> TokenRows:
    """Return a module's attention; the layer for ConViT adds its position part, without computing the sum of both."""
    module = frame.module
    if not isinstance(module, GatedPositionalAttention):
        return rows
    side = math.isqrt(rows.queries)
    sizes = next((each for each in frame.arguments[1:] if each is not None), (side, side))
    return gated_rows(rows, module.position_operator(sizes), torch.sigmoid(module.gating_param))
