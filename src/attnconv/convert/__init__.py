"""Convolutions as attention, and attention as convolutions: layers and whole networks."""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
