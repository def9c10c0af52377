"""Model surgery: prune heads, replace heads with convolutions, and initialise attention as a convolution."""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
