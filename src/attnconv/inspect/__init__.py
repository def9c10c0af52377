"""Capture the attention of a model; compute statistics of its heads and convolution scores of its layers."""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
