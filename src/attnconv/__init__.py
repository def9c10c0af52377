"""attnconv: self-attention that performs convolution, after Cordonnier, Loukas and Jaggi (ICLR 2020).

The names below are the whole top-level surface; everything else lives in the subpackages. Names are imported when first
used, so that ``import attnconv`` does not import torch.
"""

from attnconv._util.exports import attach

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = attach(__name__, __file__)
