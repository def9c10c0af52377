"""What the theorem says of given heads: Lemmas 1 to 3 decided, error bounds, and where heads stand best."""

from attnconv._util.exports import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
