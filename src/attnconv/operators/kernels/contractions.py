"""Building blocks of all operators: mixing with given probabilities, projection with per-head weights, and softmax."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def project(mixed: Float[Tensor, "*lead h c"], weight: Float[Tensor, "h i d"], groups: int) -> Float[Tensor, "*lead d"]:
    """Compute sum_h Y_h W_h for mixed values Y_h = A_h X in one product; groups as in a grouped convolution."""
    if groups == 1:
        return mixed.flatten(-2) @ weight.flatten(0, 1)
    return torch.einsum("...hgi,higd->...gd", _grouped(mixed, groups), _grouped(weight, groups)).flatten(-2)


def project_each(mixed: Float[Tensor, "h p c"], weight: Float[Tensor, "h i d"], groups: int) -> Float[Tensor, "p h d"]:
    """Compute Y_h W_h for every head, without summing; groups as in `project`."""
    if groups == 1:
        out = mixed.new_empty((mixed.shape[1], len(weight), weight.shape[2]))
        _each(mixed, weight, out.transpose(0, 1))
        return out
    return torch.einsum("hpgi,higo->phgo", _grouped(mixed, groups), _grouped(weight, groups)).flatten(2)


def project_back(gradient: Float[Tensor, "p d"], weight: Float[Tensor, "h i d"], groups: int) -> Float[Tensor, "h p c"]:
    """Compute the adjoint of `project` and `project_each`, G W_h^T for every head."""
    if groups == 1:
        out = gradient.new_empty((len(weight), len(gradient), weight.shape[1]))
        return _each(gradient.expand(len(weight), -1, -1), weight.mT, out)
    return torch.einsum("pgo,higo->hpgi", _grouped(gradient, groups), _grouped(weight, groups)).flatten(2)


def add_project_gradient(
    total: Float[Tensor, "h i d"], mixed: Float[Tensor, "h p c"], gradient: Float[Tensor, "h p d"], groups: int
) -> None:
    """Add the gradient of the weights, Y_h^T G_h, or its diagonal blocks if there are groups, to `total`."""
    if groups > 1:
        blocks = torch.einsum("hpgi,hpgo->higo", _grouped(mixed, groups), _grouped(gradient, groups))
        total.add_(blocks.flatten(2))
    elif _by_head(mixed) and total.dtype == mixed.dtype:
        for into, left, right in zip(total, mixed.mT, gradient, strict=True):
            torch.addmm(into, left, right, out=into)
    else:
        total.add_(torch.bmm(mixed.mT, gradient))


def _grouped(tensor: Tensor, groups: int) -> Tensor:
    return tensor.unflatten(-1, (groups, -1))


def _each(
    left: Float[Tensor, "h p i"], right: Float[Tensor, "h i d"], out: Float[Tensor, "h p d"]
) -> Float[Tensor, "h p d"]:
    """Compute one product per head into `out`."""
    if not _by_head(left):
        return torch.bmm(left, right, out=out)
    for head, into in enumerate(out):
        torch.mm(left[head], right[head], out=into)
    return out


def _by_head(tensor: Tensor) -> bool:
    """Return whether heads are multiplied one by one: on a CPU, `bmm` gives whole heads to threads, often unevenly."""
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)


def transposed(weight: Float[Tensor, "h i d"], groups: int) -> Float[Tensor, "h o c"]:
    """Transpose W_h within each group: the j-th d / groups inputs then map to the j-th c / groups outputs."""
    return weight.mT if groups == 1 else weight.unflatten(-1, (groups, -1)).transpose(1, 3).flatten(2)


def project_heads(
    x: Float[Tensor, "*lead c"], weight: Float[Tensor, "h i d"], groups: int
) -> Float[Tensor, "*lead h d"]:
    """Compute X W_h for every head, before mixing; groups as in `project`."""
    if groups == 1:
        return (x @ weight.movedim(0, 1).flatten(1)).unflatten(-1, (len(weight), -1))
    return torch.einsum("...gi,higd->...hgd", _grouped(x, groups), _grouped(weight, groups)).flatten(-2)


def contract_rows(
    probabilities: Float[Tensor, "#b h n m"],
    keys: Float[Tensor, "b m c"],
    weight: Float[Tensor, "h i d"],
    groups: int,
) -> Float[Tensor, "b n d"]:
    """Compute sum_h A_h X W_h for given rows of A, in the order that mixes fewer channels."""
    probabilities = probabilities.to(keys.dtype)
    heads = weight.shape[0]
    if weight.shape[2] < keys.shape[-1]:
        values = project_heads(keys, weight, groups)  # (b, m, h, d)
        wide = probabilities.transpose(1, 2).flatten(2)  # (1 or b, n, h m)
        return _of_each_image(wide, values.transpose(1, 2).flatten(1, 2))
    tall = probabilities.transpose(1, 2).flatten(1, 2)  # (1 or b, n h, m)
    mixed = _of_each_image(tall, keys)  # (b, n h, c), in the order required by the projection
    return project(mixed.unflatten(1, (-1, heads)), weight, groups)


def _of_each_image(left: Float[Tensor, "#b i j"], right: Float[Tensor, "b j k"]) -> Float[Tensor, "b i k"]:
    """Compute one product per image. Gradients of a shared `left` copy b i k numbers with `@`, and b i j with `bmm`."""
    if not torch.compiler.is_compiling() and left.shape[-1] > right.shape[-1]:  # sizes may be symbolic
        return left @ right
    return torch.bmm(left.expand(right.shape[0], -1, -1), right)


def below_largest(scores: Float[Tensor, "*lead lattice"]) -> Float[Tensor, "*lead lattice"]:
    """Subtract the maximum of each row, which leaves the softmax unchanged and loses less precision in casts."""
    return scores - scores.amax(-1, keepdim=True).detach()


def banded_softmax(scores: Float[Tensor, "*lead lattice"], dtype: torch.dtype) -> Float[Tensor, "*lead lattice"]:
    """Compute a softmax over the last axis, dropping keys whose weight is below eps^2 times the largest weight.

    Differences of scores are computed in the dtype of the scores, which may be wider than `dtype`.
    """
    cut = 2 * math.log(torch.finfo(dtype).eps)
    return torch.softmax(F.threshold(below_largest(scores).to(dtype), cut, -math.inf), -1)


def axis_sum(parts: Sequence[Float[Tensor, "*lead _"]]) -> Float[Tensor, "*lead lattice"]:
    """Combine scores per axis into scores over the lattice: s[.., (l1, l2)] = s1[.., l1] + s2[.., l2]."""
    total = parts[0]
    for part in parts[1:]:
        total = (total[..., :, None] + part[..., None, :]).flatten(-2)
    return total
