from .attention_flow import attention_rollout as attention_rollout
from .auditing import Audit as Audit, LayerAudit as LayerAudit, audit as audit
from .capture import attention_operators as attention_operators, visit_attention as visit_attention
from .chosen_queries import QueryMaps as QueryMaps, mean_query_maps as mean_query_maps, sample_queries as sample_queries
from .head_statistics import (
    LayerStatistics as LayerStatistics,
    RunningStatistics as RunningStatistics,
    convolution_score as convolution_score,
    grid_coverage as grid_coverage,
    layer_statistics as layer_statistics,
)
from .moments import AttentionMoments as AttentionMoments, attention_moments as attention_moments
from .null_models import (
    LayerTrend as LayerTrend,
    MirrorSymmetry as MirrorSymmetry,
    TurnedHeads as TurnedHeads,
    layer_trend as layer_trend,
    mirror_partners as mirror_partners,
    mirror_symmetry as mirror_symmetry,
    turned_heads as turned_heads,
)
from .shift_profiles import (
    RunningShiftProfile as RunningShiftProfile,
    ShiftProfile as ShiftProfile,
    shift_profile as shift_profile,
)
from .token_operator import TokenOperator as TokenOperator
