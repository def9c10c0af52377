"""The theorem as software: convolutions as attention, and back."""

from typing import TYPE_CHECKING

from attnconv._lazy import attach

if TYPE_CHECKING:
    from attnconv.theorem.construct import from_conv as from_conv
    from attnconv.theorem.construct import hard_alpha as hard_alpha
else:
    __getattr__, __dir__, __all__ = attach(__name__, {"from_conv": "construct", "hard_alpha": "construct"})
