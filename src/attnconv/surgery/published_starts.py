"""Published initialisations of query, key, value and output projections: mimetic, impulse and conditioned.

For scores `(W_q x_i) . (W_k x_j)`, they choose `W_q^T W_k` of each head and `W_out W_v` of each layer. Random numbers
are generated in float64 on the CPU, so that a seed gives the same weights on every device.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor, nn

from attnconv._util.errors import bad
from attnconv.inspect.module_adapters import AttentionParts, VitParts
from attnconv.surgery.convolution_start import shifted_keys

MIMETIC = 0.7  # factor of the noise and of the identity in the scores of mimetic initialisation
IMPULSE, NOISE, NOISE_STD = 1000.0, 3.0, 0.6  # target scores at the shift; factor and truncated normal std elsewhere
IMPULSE_NORM = 7.0  # Frobenius norm of each head's query and key projection
POSITIONS_STD = 0.36
SHIFTS = ((0, 0), (-1, 0), (0, 1), (0, -1), (1, 0), (-1, -1), (-1, 1), (1, -1), (1, 1))  # of the heads, in this order


def noisy_identity(
    channels: int, rank: int, noise: float, identity: float, generator: Generator | None
) -> tuple[Float[Tensor, "k c"], Float[Tensor, "k c"]]:
    """Return A and B such that `A^T B` is the best approximation of rank k of `noise Z + identity I`.

    The entries of Z have variance 1 / channels. With the singular value decomposition U S V^T, A is sqrt(S) U^T and B
    is sqrt(S) V^T (Trockman and Kolter, 2023).
    """
    random = torch.randn(channels, channels, dtype=torch.float64, generator=generator) / channels**0.5
    left, values, right = torch.linalg.svd(noise * random + identity * torch.eye(channels, dtype=torch.float64))
    root = values[:rank, None].sqrt()
    return root * left[:, :rank].T, root * right[:rank]


def orthogonal(channels: int, rank: int, generator: Generator | None) -> Float[Tensor, "k c"]:
    """Return a random matrix with orthonormal rows."""
    return nn.init.orthogonal_(torch.empty(rank, channels, dtype=torch.float64), generator=generator)


def impulse(
    positions: Float[Tensor, "n c"], targets: Float[Tensor, "h n n"], rank: int
) -> tuple[Float[Tensor, "h k c"], Float[Tensor, "h k c"]]:
    """Return query and key projections of heads whose scores approximate the targets (Zheng et al., 2025).

    With P the normalised positions, `M = P^+ T (P^+)^T` solves `P M P^T = T` in the least-squares sense, where the
    pseudo-inverse uses the k largest singular values of P. M has rank k. Its factors are scaled to the same norm.
    """
    normalised = F.layer_norm(positions.double(), positions.shape[-1:])
    left, values, right = torch.linalg.svd(normalised, full_matrices=False)
    inverse = left[:, :rank] / values[:rank]  # P^+ = V inverse^T, hence M = V (inverse^T T inverse) V^T
    left, values, right_core = torch.linalg.svd(inverse.T @ targets.double() @ inverse)
    root = values.sqrt()[..., None]
    query, key = (root * core @ right[:rank] for core in (left.mT, right_core))
    norm = IMPULSE_NORM / root.square().sum((1, 2), keepdim=True).sqrt()  # both factors have the norm of the roots
    return norm * query, norm * key


def impulse_targets(
    keys: Int[Tensor, "h n"], inside: Bool[Tensor, "h n"], generator: Generator | None
) -> Float[Tensor, "h n n"]:
    """Return target scores: 1000 at the key of each query, if it is inside the image, and noise elsewhere."""
    noise = torch.empty(*keys.shape, keys.shape[1], dtype=torch.float64)
    targets = NOISE * nn.init.trunc_normal_(noise, std=NOISE_STD, generator=generator)
    head, query = inside.nonzero().T
    targets[head, query, keys[inside]] = IMPULSE
    return targets


def set_positions(parts: VitParts, positions: str, generator: Generator | None) -> None:
    """Set the positional vectors of the image tokens."""
    if positions == "normal":
        image = parts.positions[:, -parts.grid[0] * parts.grid[1] :]
        image.copy_(POSITIONS_STD * torch.randn(image.shape, dtype=torch.float64, generator=generator))


def set_values(
    attention: AttentionParts, values: str, identity: float, noise: float, generator: Generator | None
) -> None:
    """Set the value and output projections of a layer: `W_out W_v = noise Z + identity I`, or `W_v = I`."""
    value, out = attention.value.weight, attention.out.weight
    if values == "mimetic":
        left, right = noisy_identity(len(out), len(value), noise, identity, generator)
        out.copy_(left.T)
        value.copy_(right)
    elif values == "identity":
        value.copy_(torch.eye(*value.shape))


def set_scores(
    attention: AttentionParts, scores: str, parts: VitParts, generator: Generator | None
) -> Int[Tensor, "s 2"]:
    """Set the query and key projections of all heads; return the shifts that they prefer, if any, one per head."""
    size, channels, heads = attention.head_dim, attention.query.weight.shape[1], range(attention.heads)
    shifts = torch.zeros(0, 2, dtype=torch.int64)
    if scores == "mimetic":
        pairs = [noisy_identity(channels, size, MIMETIC, MIMETIC, generator) for _ in heads]
    elif scores == "orthogonal":
        pairs = [(orthogonal(channels, size, generator), orthogonal(channels, size, generator)) for _ in heads]
    elif scores == "impulse":
        shifts = torch.tensor(SHIFTS)[torch.arange(attention.heads) % len(SHIFTS)]
        targets = impulse_targets(*shifted_keys(shifts, parts.grid), generator)
        if (tokens := targets.shape[1]) < size:
            requirement = f"'impulse' needs at least as many image tokens as channels per head ({size})"
            raise ValueError(bad("attention", requirement, tokens))
        image = parts.positions[0, -targets.shape[1] :].cpu()
        pairs = list(zip(*impulse(image, targets, size), strict=True))
    else:
        return shifts
    for part, new in zip((attention.query, attention.key), map(torch.cat, zip(*pairs, strict=True)), strict=True):
        part.weight.copy_(new)
    return shifts
