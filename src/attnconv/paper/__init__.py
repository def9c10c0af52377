"""Reproduction of the paper: its runs, tables, figures and claims. Only the command line imports it."""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
