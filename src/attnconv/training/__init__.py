"""Training: settings, recipes, the fit itself and the folder that a run leaves.

    from attnconv.training import fit, recipe

    run = fit(recipe("quadratic-digits"), "runs/digits")

Importing this package, its ``settings`` or its ``recipes`` does not import torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
