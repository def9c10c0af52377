"""Self-attention layers that can express any convolution, after Cordonnier, Loukas and Jaggi (ICLR 2020).

`__init__.pyi` lists the public top-level names; the subpackages contain the rest. Names are imported on first use, so
that `import attnconv` does not import torch.
"""

from attnconv._util.exports import attach

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = attach(__name__, __file__)
