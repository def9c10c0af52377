"""The study of the paper: its runs, tables, figures and claims. Only the command line imports it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
