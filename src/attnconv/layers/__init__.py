"""Self-attention layers for sequences, images and volumes, with the tensor shapes of nn.Conv1d/2d/3d."""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
