"""The theorem as software: convolutions as attention, and back."""

from typing import TYPE_CHECKING

from attnconv._lazy import attach

if TYPE_CHECKING:
    from attnconv.theorem.bounds import alpha_for as alpha_for
    from attnconv.theorem.bounds import error_bound as error_bound
    from attnconv.theorem.bounds import mass_off as mass_off
    from attnconv.theorem.comparison import Comparison as Comparison
    from attnconv.theorem.comparison import LayerComparison as LayerComparison
    from attnconv.theorem.comparison import compare as compare
    from attnconv.theorem.construct import HARD_ALPHA as HARD_ALPHA
    from attnconv.theorem.construct import SOFT_ALPHA as SOFT_ALPHA
    from attnconv.theorem.construct import equation_9 as equation_9
    from attnconv.theorem.construct import from_conv as from_conv
    from attnconv.theorem.factoring import factor as factor
    from attnconv.theorem.factoring import factor_error as factor_error
    from attnconv.theorem.factoring import head_ranks as head_ranks
    from attnconv.theorem.imitation import imitate as imitate
    from attnconv.theorem.imitation import imitation_error as imitation_error
    from attnconv.theorem.invert import conversion_error as conversion_error
    from attnconv.theorem.invert import to_conv as to_conv
    from attnconv.theorem.networks import plan_shifts as plan_shifts
    from attnconv.theorem.networks import recast as recast
    from attnconv.theorem.networks import restore as restore
    from attnconv.theorem.phi import Fit as Fit
    from attnconv.theorem.phi import Residuals as Residuals
    from attnconv.theorem.placement import place_heads as place_heads
    from attnconv.theorem.proof import Proof as Proof
    from attnconv.theorem.proof import draw_convolution as draw_convolution
    from attnconv.theorem.proof import no_convolutions as no_convolutions
    from attnconv.theorem.proof import prove as prove
    from attnconv.theorem.span import Expressiveness as Expressiveness
    from attnconv.theorem.span import Factorisation as Factorisation
    from attnconv.theorem.span import can_express as can_express
    from attnconv.theorem.span import factorise as factorise
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "Comparison": "comparison",
            "Expressiveness": "span",
            "Factorisation": "span",
            "Fit": "phi",
            "HARD_ALPHA": "construct",
            "LayerComparison": "comparison",
            "Proof": "proof",
            "Residuals": "phi",
            "SOFT_ALPHA": "construct",
            "alpha_for": "bounds",
            "can_express": "span",
            "compare": "comparison",
            "conversion_error": "invert",
            "draw_convolution": "proof",
            "equation_9": "construct",
            "error_bound": "bounds",
            "factor": "factoring",
            "factor_error": "factoring",
            "factorise": "span",
            "from_conv": "construct",
            "head_ranks": "factoring",
            "imitate": "imitation",
            "imitation_error": "imitation",
            "mass_off": "bounds",
            "no_convolutions": "proof",
            "place_heads": "placement",
            "plan_shifts": "networks",
            "prove": "proof",
            "recast": "networks",
            "restore": "networks",
            "to_conv": "invert",
        },
    )
