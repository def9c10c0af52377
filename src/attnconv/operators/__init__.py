"""Attention operators: structured matrices of attention probabilities."""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
