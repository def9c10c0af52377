"""Theory of Lemmas 1 to 3: the convolutions that given heads can express, error bounds, and best-fitting weights."""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
