"""The heads of a model as plain numbers: the data of the paper's Figure 3."""

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from attnconv.encodings.base import Encoding
from attnconv.encodings.gaussians import Gaussians
from attnconv.training.run_folder import HeadsLine, LayerHeads

# A head without spatial preference has an infinite covariance, which JSON cannot say. 1e12 is wider than any image.
WIDEST = 1e12


def head_record(model: nn.Module, epoch: int) -> HeadsLine:
    """One line of `heads.jsonl`: all layers of Gaussian heads after an epoch."""
    layers: list[LayerHeads] = [
        {
            "name": path.removesuffix(".encoding"),
            "centres": heads.centres.detach().double().cpu().tolist(),
            "covariance": covariance(heads).tolist(),
        }
        for path, module in model.named_modules()
        if isinstance(module, Encoding) and (heads := module.gaussians()) is not None
    ]
    return {"epoch": epoch, "layers": layers}


def covariance(heads: Gaussians) -> Float64[Tensor, "h dims dims"]:
    """Covariance of each head's Gaussian in float64 on the CPU, its eigenvalues at most `WIDEST`."""
    values, vectors = torch.linalg.eigh(heads.precision)
    result: Tensor = vectors @ torch.diag_embed(1 / values.clamp(min=1 / WIDEST)) @ vectors.mT
    return result
