"""Layers: self-attention over sequences, images and volumes, with the face of nn.Conv1d/2d/3d."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
