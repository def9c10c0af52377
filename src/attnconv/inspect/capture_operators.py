"""The attention operators that a model uses on given images.

The very probabilities of this forward pass, whatever backend or kernel contracts them; `attnconv.inspect.capture` says
how they are seen.
"""

from collections.abc import Callable

from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.input_checks import check_tensor
from attnconv.inspect.capture import visit_attention
from attnconv.inspect.image_checks import blaming_images
from attnconv.operators.base import AttentionOperator


def attention_operators(model: nn.Module, images: Tensor) -> dict[str, AttentionOperator]:
    """The operators of all attention layers of a model, by the layers' names.

    Operators of content-based layers hold queries and keys of every image: use `visit_operators` where they are needed
    one at a time.

    Args:
        model: Any module with attention that `visit_attention` reads. It runs in evaluation mode and without gradients,
            and is left in the mode it was in. Of models of other libraries that run unfused, only `visit_attention`
            gives rows.
        images: What the model's forward pass takes, (b, c, height, width).

    Returns:
        Name of the layer in the model -> its operator, in the order in which the layers run. A layer that runs several
        times keeps its last operator.

    Raises:
        TypeError: `model` is no module, or `images` no tensor.
        ValueError: The model has no attention layer that runs, or `images` are not what its forward pass takes.

    Example:
        >>> import torch
        >>> from attnconv import SelfAttention2d
        >>> layer = SelfAttention2d(3, 4, heads=2)
        >>> operators = attention_operators(nn.Sequential(layer, nn.ReLU()), torch.zeros(1, 3, 5, 6))
        >>> {name: operator.grid.sizes for name, operator in operators.items()}
        {'0': (5, 6)}
    """
    found: dict[str, AttentionOperator] = {}
    with blaming_images(model, images):
        visit_operators(model, images, found.__setitem__)
    return found


def content_layers(model: nn.Module, images: Tensor) -> tuple[str, ...]:
    """Names of the layers whose probabilities depend on what an image shows, not on positions alone.

    Args:
        model: See `attention_operators`.
        images: (b, c, height, width), b at least 2; their values do not matter.

    Raises:
        TypeError, ValueError: Fewer than two images, or as for `attention_operators`.
    """
    check_tensor(images)
    if len(images) < 2:
        raise ValueError(bad("images", "must hold at least two images", len(images)))
    found: dict[str, bool] = {}

    def look(name: str, operator: AttentionOperator) -> None:
        found[name] = operator.batch > 1

    with blaming_images(model, images):
        visit_operators(model, images, look)
    return tuple(name for name, content in found.items() if content)


def visit_operators(model: nn.Module, images: Tensor, visit: Callable[[str, AttentionOperator], None]) -> None:
    """`visit_attention` for models that need no further word: the operator of each attention, just before it runs.

    Args:
        model: See `attention_operators`.
        images: What the model's forward pass takes.
        visit: Called with the layer's name and its operator, without gradients.

    Raises:
        ValueError: See `visit_attention`.
    """
    visit_attention(model, images, visit)
