"""The attention of any model, read while it runs: no code of the model is touched.

Hooks keep the names of the modules that are running. Layers of this library give their operator themselves; for all
other models the calls that compute attention are seen where they reach PyTorch (`attention_calls`), placed on the image
(`token_places`) and handed over one at a time, so that the memory needed is that of one layer.

What cannot be read is refused with the module's name, and those that can be read are listed. That includes modules
named as attention in which none was seen: a model must not lose a map without a word. A caller may take the refusals
itself, one by one, and have the rest.
"""

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attnconv._util.errors import bad
from attnconv._util.eval_mode import evaluating
from attnconv._util.input_checks import check_module, check_tensor
from attnconv._util.value_checks import is_index, whole
from attnconv.inspect.attention_rows import GatedRows, PlacedRows, ScoreRows, TokenRows, UnreadableError
from attnconv.inspect.capture_calls import AttentionCalls
from attnconv.inspect.token_grid import Places, Running, layout_of
from attnconv.inspect.token_operator import TokenOperator
from attnconv.layers.gated_positional import GatedPositionalAttention
from attnconv.layers.self_attention import SelfAttention
from attnconv.operators.base import AttentionOperator

# Modules whose probabilities are not the softmax that they compute, by class: what they do instead.
_DIFFERENCE = "it attends by the difference of two softmaxes"
_TALKING = "it mixes its heads after the softmax"
_CHANNELS = "it attends among channels, not among tokens"
NOT_A_SOFTMAX = {
    "DiffAttention": _DIFFERENCE,
    "DiffParallelScalingBlock": _DIFFERENCE,
    "TalkingHeadAttn": _TALKING,
    "XCA": _CHANNELS,
    "CrossCovarianceAttn": _CHANNELS,
}


def visit_attention(
    model: nn.Module,
    images: Tensor,
    visit: Callable[[str, AttentionOperator], None],
    *,
    grid: Sequence[int] | None = None,
    prefix: int | None = None,
    layers: Collection[str] | None = None,
    options: Mapping[str, object] | None = None,
    unreadable: Callable[[str, str], None] | None = None,
) -> None:
    """Run a model once and hand the operator of each of its attentions to a function, just before it is computed.

    Layers of this library, timm's and torchvision's vision transformers, Hugging Face's ViT family, torch's
    nn.MultiheadAttention and whatever else calls PyTorch's attention or a softmax over keys. Rows are those of the
    tokens of the image over one another; see `TokenOperator`.

    Args:
        model: Any module. It runs in evaluation mode and without gradients, and is left in the mode it was in.
        images: What the model's forward pass takes, (b, c, height, width) for a model of images.
        visit: Called with the module's name and its operator, in the order in which attentions run. A module that
            attends twice is visited twice.
        grid: Tokens of the image, (height, width), for models that do not say it and for inputs that are no images;
            windows know theirs.
        prefix: Class tokens and registers before the image's tokens, for models that do not say it. With `grid`,
            what is neither stands after them.
        layers: Names of the modules to read; None for all. What is not named is neither read nor refused.
        options: Further arguments of the model's forward pass by name, as `interpolate_pos_encoding`.
        unreadable: Called in the place of an error with the name of each module whose attention cannot be read and the
            reason; what can be read is visited all the same. None stops at the first. Modules that `layers` names are
            never passed over.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: An attention cannot be read: its module's name, the reason, and what can be read. Or the model has
            no attention that runs, or one that `layers` names does not run; or its forward pass takes other arguments.

    Example:
        >>> block = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=8, batch_first=True)
        >>> def visit(name: str, operator: AttentionOperator) -> None:
        ...     print(name, operator.grid.sizes, tuple(operator.rows(torch.tensor([0, 5])).shape))
        >>> visit_attention(block, torch.zeros(1, 12, 8), visit, grid=(3, 4))
        self_attn (3, 4) (1, 2, 2, 12)
    """
    functions = {"visit": visit} if unreadable is None else {"visit": visit, "unreadable": unreadable}
    _check_arguments(model, images, functions, grid, prefix, layers)
    call_options = checked_options(model, images, options)
    places = Places(None if grid is None else tuple(grid), prefix)
    reading = _Reading(images, visit, places, None if layers is None else frozenset(layers), unreadable)
    handles: list[RemovableHandle] = []
    try:
        for name, module in model.named_modules():
            handles.extend(reading.watch(name, module))
        with torch.no_grad(), evaluating(model), uncompiled(model), AttentionCalls(reading.call):
            model(images, **call_options)
    except Exception:
        reading.check_refused()  # what comes after a refusal would hide it
        raise
    finally:
        for handle in handles:
            handle.remove()
    reading.check(model)


def _check_arguments(
    model: object, images: object, functions: Mapping[str, object], grid: object, prefix: object, layers: Any
) -> None:
    """Refuse arguments of other kinds before a hook is set."""
    check_module(model)
    check_tensor(images)
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(bad(name, "must be a function", type(function).__name__))
    if grid is not None and not (isinstance(grid, Sequence) and all(is_index(size) for size in grid)):
        raise TypeError(bad("grid", "must be whole numbers, (height, width), or None", repr(grid)))
    if prefix is not None:
        whole("prefix", prefix, 0)
    names = isinstance(layers, Collection) and not isinstance(layers, str)
    if layers is not None and not (names and all(isinstance(name, str) for name in layers)):
        raise TypeError(bad("layers", "must be a list of names, or None", repr(layers)))


def checked_options(model: nn.Module, images: Tensor, options: Any) -> dict[str, object]:
    """The options of a model's call, held against the signature of its forward pass.

    Args:
        model: The model.
        images: Its first argument.
        options: Further arguments by name; None for none.

    Raises:
        ValueError: The forward pass takes no such argument, or wants others besides.

    Example:
        >>> checked_options(nn.ReLU(), torch.zeros(1), {"mask": None})
        Traceback (most recent call last):
        ValueError: options: must be what the forward pass of ReLU takes by name, got mask. It says: got an unexpected \
keyword argument 'mask'.
    """
    if options is not None and not (isinstance(options, Mapping) and all(isinstance(name, str) for name in options)):
        raise TypeError(bad("options", "must be a mapping from names to values, or None", repr(options)))
    given: dict[str, object] = {} if options is None else dict(options)
    try:
        signature = inspect.signature(model.forward)
    except ValueError:  # of compiled scripts there is none
        return given
    try:
        signature.bind(images, **given)
    except TypeError as error:
        requirement = f"must be what the forward pass of {type(model).__name__} takes by name"
        raise ValueError(bad("options", requirement, ", ".join(given) or "none", f"It says: {error}.")) from error
    return given


@final
class _Reading:
    """The state of one visit: which modules are running, and what was read."""

    def __init__(
        self,
        images: Tensor,
        visit: Callable[[str, AttentionOperator], None],
        places: Places,
        layers: frozenset[str] | None,
        unreadable: Callable[[str, str], None] | None,
    ) -> None:
        self._unreadable = unreadable if layers is None else None
        self._refused: dict[str, tuple[nn.Module, str]] = {}
        self._images, self._visit, self._places, self._layers = images, visit, places, layers
        self._running: list[Running] = []
        self._visiting = False  # what the visitor runs is no part of the pass
        self._own = 0  # layers of this library that are running: what they call is theirs
        self._first_of_two: tuple[str, TokenRows] | None = None
        self._seen: dict[str, None] = {}  # in the order in which they run

    def watch(self, name: str, module: nn.Module) -> list[RemovableHandle]:
        """Hooks that note when a module begins and ends."""
        if isinstance(module, torch.jit.ScriptModule):
            if self._layers is None:
                self._refuse(name, module, "it is a compiled script, which hides what it calls")
            return []

        return [
            module.register_forward_pre_hook(
                lambda module, args, named: self._begin(name, module, args, named), with_kwargs=True
            ),
            module.register_forward_hook(
                lambda module, _args, output: self._end(name, module, output), always_call=True
            ),
        ]

    def _begin(self, name: str, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._visiting:
            return
        self._running.append(_running(name, module, args, named))
        reason = getattr(module, "attention_unreadable", None)
        if reason is not None and self._wanted(name):
            self._refuse(name, module, reason)
        if isinstance(module, SelfAttention):
            self._own += 1
            if self._own == 1 and self._wanted(name):
                self._hand_over(name, module.operator(next(iter((*args, *named.values())))))

    def _end(self, name: str, module: nn.Module, output: Any) -> None:
        if self._visiting:
            return
        frame = self._running.pop()
        if isinstance(module, SelfAttention):
            self._own -= 1
        if self._running:
            self._running[-1].calls += frame.calls
        # An error has no output; it must not be hidden behind another.
        silent = output is not None and frame.calls == 0 and self._own == 0
        if silent and _claims_attention(module) and self._wanted(name):
            self._refuse(name, module, "no call of PyTorch's attention and no softmax over keys is seen in it")

    def call(self, read: Callable[[], TokenRows]) -> None:
        """A call of attention that is about to run."""
        if self._own > 0 or self._visiting:
            return
        frames = self._running
        while len(frames) > 1 and isinstance(frames[-1].module, nn.Softmax):
            frames = frames[:-1]
        frame = frames[-1]
        frame.calls += 1
        if not self._wanted(frame.name) or frame.name in self._refused:
            return
        try:
            if (other := _other_formula(frame.module)) is not None:
                raise UnreadableError(other)
            rows = read()
            if isinstance(frame.module, GatedPositionalAttention):
                if isinstance(rows, ScoreRows):  # of positions along one axis: they are added below
                    return
                rows = _beside_positions(frame, frame.module, rows)
            elif type(frame.module).__name__ == "GPSA":
                gated = self._gated(frame, rows)
                if gated is None:
                    return
                rows = gated
            layout = layout_of(frames, rows, self._images, self._places)
        except UnreadableError as reason:
            self._refuse(frame.name, frame.module, str(reason))
            return
        self._hand_over(frame.name, TokenOperator(rows, layout))
        rows.release()

    def _gated(self, frame: Running, rows: TokenRows) -> TokenRows | None:
        """ConViT computes the attention by content, then that by position: None until both are there."""
        if self._first_of_two is None or self._first_of_two[0] != frame.name:
            self._first_of_two = (frame.name, rows)
            return None
        content, self._first_of_two = self._first_of_two[1], None
        module: Any = frame.module
        return GatedRows(content, rows, torch.sigmoid(module.gating_param))

    def _wanted(self, name: str) -> bool:
        return self._layers is None or name in self._layers

    def _hand_over(self, name: str, operator: AttentionOperator) -> None:
        self._running[-1].calls += isinstance(self._running[-1].module, SelfAttention)
        self._seen[name] = None
        if self._refused and self._unreadable is None:  # nobody wants it any more, but its name
            return
        self._visiting = True
        self._visit(name, operator)
        self._visiting = False

    def _refuse(self, name: str, module: nn.Module, reason: str) -> None:
        """Note what cannot be read. Where that is an error, the pass goes on to see what can be."""
        if name in self._refused:
            return
        self._refused[name] = (module, reason)
        if self._running:
            self._running[-1].calls += 1  # its parents need not say that nothing was seen in them
        if self._unreadable is not None:
            self._unreadable(name, reason)

    def check_refused(self) -> None:
        """Stop at the first refusal, unless the caller takes them."""
        if self._refused and self._unreadable is None:
            name, (module, reason) = next(iter(self._refused.items()))
            raise _refusal(name, module, reason, [name for name in self._seen if name not in self._refused])

    def check(self, model: nn.Module) -> None:
        """Refuse a pass without attention, or without a layer that was asked for."""
        self.check_refused()
        missing = sorted((self._layers or frozenset()) - self._seen.keys())
        if missing:
            requirement = "must name modules in which attention is seen"
            raise ValueError(bad("layers", requirement, repr(missing), "visit_attention names them as it goes."))
        if not self._seen and not self._refused:
            fix = "No layer of this library, no call of PyTorch's attention and no softmax over keys was seen in it."
            raise ValueError(bad("model", "must attend at least once", type(model).__name__, fix))


def _running(name: str, module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> Running:
    """A module that begins, with what its inputs say of its tokens."""
    first = next(iter((*args, *named.values())), None)
    second = named.get("input_dimensions", named.get("sizes", args[1] if len(args) > 1 else None))
    shape = tuple(first.shape) if isinstance(first, Tensor) else None
    pair = isinstance(second, tuple) and len(second) == 2 and all(isinstance(part, int) for part in second)
    return Running(name, module, shape, second if pair else None)


def _beside_positions(frame: Running, module: GatedPositionalAttention, content: TokenRows) -> TokenRows:
    """This library's gated attention calls PyTorch's for its content alone."""
    side = math.isqrt(content.queries)
    position = PlacedRows(module.position_operator(frame.resolution or (side, side)), content.batch)
    return GatedRows(content, position, torch.sigmoid(module.gating_param))


def uncompiled(model: nn.Module) -> AbstractContextManager[object]:
    """Where compiled modules run as they were written: what is compiled does not ask for hooks.

    Args:
        model: Any module.
    """
    compiled = any(
        type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def _other_formula(module: nn.Module) -> str | None:
    """What a module does with its softmax that makes its probabilities others; None for what is not known to."""
    kind = type(module).__name__
    if kind in NOT_A_SOFTMAX:
        return NOT_A_SOFTMAX[kind]
    if "ChannelAttention" in kind:
        return _CHANNELS
    # Class names do not tell: timm has an Attention2d with talking heads (EfficientFormerV2) and one without.
    return _TALKING if isinstance(getattr(module, "talking_head2", None), nn.Module) else None


def _claims_attention(module: nn.Module) -> bool:
    """Whether a module's class is named as an attention, by its last word."""
    name = type(module).__name__.lower()
    return name.endswith(("attention", "attn")) or type(module).__name__ in NOT_A_SOFTMAX


def _refusal(name: str, module: nn.Module, reason: str, readable: Sequence[str]) -> ValueError:
    requirement = f"the attention of module {name!r} must be readable"
    fix = f"It is not: {reason}."
    if readable:
        fix += f" Others are: pass layers (--layers) {','.join(readable)}"
        fix += ", or to `audit` skip_unreadable (--skip-unreadable), which names what it leaves out."
    return ValueError(bad("model", requirement, type(module).__name__, fix))
