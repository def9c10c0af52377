"""Training: settings, recipes, the fit itself and the folder that a run leaves.

    from attnconv.training import fit, recipe

    run = fit(recipe("quadratic-digits"), "runs/digits")

Importing this package, its ``settings`` or its ``recipes`` does not import torch.
"""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
