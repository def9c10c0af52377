from .few_or_narrow_heads import (
    head_ranks as head_ranks,
    low_rank as low_rank,
    low_rank_error as low_rank_error,
    place_heads as place_heads,
)
from .layer_conversion import (
    HARD_ALPHA as HARD_ALPHA,
    SOFT_ALPHA as SOFT_ALPHA,
    conversion_error as conversion_error,
    equation_9 as equation_9,
    from_conv as from_conv,
    to_conv as to_conv,
)
from .recast_network import plan_shifts as plan_shifts, recast as recast, restore as restore
from .verify_conversions import (
    Comparison as Comparison,
    LayerComparison as LayerComparison,
    Proof as Proof,
    compare as compare,
    draw_convolution as draw_convolution,
    no_convolutions as no_convolutions,
    prove as prove,
)
