"""The attention operators that a model uses on given images."""

from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.input_checks import check_tensor
from attnconv.inspect.capture import visit_attention
from attnconv.inspect.image_checks import blaming_images
from attnconv.operators.base import AttentionOperator


def attention_operators(model: nn.Module, images: Tensor) -> dict[str, AttentionOperator]:
    """Return the operators of all attention layers of a model, by the layers' names in the order in which they run.

    Operators of content-based layers hold queries and keys of every image; use `visit_attention` to see one at a time,
    and for models of other libraries that run unfused. A layer that runs several times has its last operator.

    Args:
        model: Any module that `visit_attention` reads.
        images: Input of the model, (b, c, height, width).

    Raises:
        TypeError: `model` is no module, or `images` no tensor.
        ValueError: The model has no attention that runs, or does not accept `images`.

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
        visit_attention(model, images, found.__setitem__)
    return found


def content_layers(model: nn.Module, images: Tensor) -> tuple[str, ...]:
    """Return the names of the layers whose probabilities depend on the image, not on positions only.

    Args:
        model: Any module that `visit_attention` reads.
        images: (b, c, height, width), b at least 2; their values do not matter.

    Raises:
        TypeError, ValueError: Fewer than two images, or as for `attention_operators`.
    """
    check_tensor(images)
    if len(images) < 2:
        raise ValueError(bad("images", "must hold at least two images", len(images)))
    operators = attention_operators(model, images)
    return tuple(name for name, operator in operators.items() if operator.batch > 1)
