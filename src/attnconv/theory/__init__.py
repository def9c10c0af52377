"""Lemmas 1 to 3 for given heads: which convolutions they express, error bounds, and best weights."""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
