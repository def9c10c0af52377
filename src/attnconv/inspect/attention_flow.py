"""Attention rollout (Abnar and Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020).

    R = A_L ... A_2 A_1,      A_l = (mean over heads of the attention of layer l + identity) / 2, with rows of sum 1

R[t, s] is the share of input token s in token t of the output. The identity represents the residual connections.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv.inspect.capture import blaming_images, visit_attention
from attnconv.inspect.token_operator import TokenOperator
from attnconv.operators.base import AttentionOperator

OTHERS = "To leave it out, pass the names of the other modules as `layers`."


def attention_rollout(
    model: nn.Module,
    images: Tensor,
    *,
    grid: Sequence[int] | None = None,
    prefix: int | None = None,
    layers: Collection[str] | None = None,
    options: Mapping[str, object] | None = None,
) -> Float[Tensor, "b tokens tokens"]:
    """Compute how much each output token draws on each input token, through all attention layers.

    All layers must attend between the same tokens: the image's tokens and the same class tokens and registers. Each
    layer is assumed to have a residual connection around it, and layers are multiplied in the order in which they run.
    The result takes neither the values nor the MLPs into account.

    Args:
        model: Any module that `visit_attention` can read. It runs in evaluation mode and without gradients.
        images: Input of the model, usually (b, c, height, width), normalised as in training.
        grid: Tokens along each axis, (height, width), as in `visit_attention`.
        prefix: Number of other tokens before them, as in `visit_attention`.
        layers: Names of the attention modules to include, such as all except attention pooling; None for all.
        options: Additional keyword arguments for the model's forward pass.

    Returns:
        R, with rows of sum 1: (output tokens, input tokens), both in the order of the model: class tokens and registers
        first, then the image's tokens, row-major. `R[:, 0, 1:]` is the map of the class token if it is the only one.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a layer attends in windows, to pooled keys or to other tokens than the layers before it; if
            attention cannot be read; or if the model rejects the images or `options`.

    Example:
        >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 3)
        >>> rollout = attention_rollout(encoder, torch.randn(2, 1 + 4 * 5, 8), grid=(4, 5), prefix=1)
        >>> rollout[:, 0, 1:].unflatten(1, (4, 5)).shape  # from the class token to the image
        torch.Size([2, 4, 5])
    """
    found: list[tuple[object, Tensor]] = []  # tokens of the first layer, and the product so far

    def visit(name: str, operator: AttentionOperator) -> None:
        tokens: tuple[object, ...] = (operator.grid.sizes, 0, 0)
        if isinstance(operator, TokenOperator):
            if operator.window is not None:
                got = "windows, or tokens in another order"
                raise ValueError(bad(f"model.{name}", "must attend to the whole image", got, OTHERS))
            tokens, rows = (operator.grid.sizes, operator.prefix, operator.suffix), operator.token_rows()
        else:
            rows = operator.to_dense()
        queries, keys = rows.shape[-2:]
        if queries != keys:
            got = f"{queries} queries and {keys} keys"
            raise ValueError(bad(f"model.{name}", "must attend from and to the same tokens", got, OTHERS))
        mean = rows.reshape(operator.batch, operator.heads, queries, keys).mean(1)
        mean = (mean + torch.eye(keys, device=mean.device, dtype=mean.dtype)) / 2
        mean = mean / mean.sum(-1, keepdim=True)  # rows with padding have a smaller sum
        if found and found[0][0] != tokens:
            requirement = "must attend between the same tokens as the layers before it, (grid, before, after)"
            got = f"{tokens} after {found[0][0]}"
            raise ValueError(bad(f"model.{name}", requirement, got, OTHERS))
        found[:] = [(tokens, mean @ found[0][1] if found else mean)]

    with blaming_images(model, images, options):
        visit_attention(model, images, visit, grid=grid, prefix=prefix, layers=layers, options=options)
    return found[0][1].expand(len(images), -1, -1)
