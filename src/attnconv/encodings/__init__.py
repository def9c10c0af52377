"""Positional encodings: attention scores as a function of the shift (key position minus query position)."""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
