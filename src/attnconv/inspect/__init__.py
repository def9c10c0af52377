"""What the heads of a model do: its attention captured, measured and scored."""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
