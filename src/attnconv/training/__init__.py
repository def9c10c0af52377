"""Training: settings, recipes, training runs and run folders.

    from attnconv.training import fit, recipe

    run = fit(recipe("quadratic-digits"), "runs/digits")

Importing this package, `settings` or `recipes` does not import torch.
"""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
