"""Attention operators: matrices of attention probabilities that know their structure."""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
