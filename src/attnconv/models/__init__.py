"""Models: the paper's classifier, a ResNet baseline, presets, checkpoints, and the loader `attnconv.load`."""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
