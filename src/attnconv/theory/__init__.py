"""What the theorem says of given heads: Lemmas 1 to 3 decided, error bounds, and where heads stand best."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
