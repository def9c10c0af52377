"""What the heads of a model do, asked from the attention operators themselves."""

from typing import TYPE_CHECKING

from attnconv._lazy import attach

if TYPE_CHECKING:
    from attnconv.analysis.arrangements import MirrorSymmetry as MirrorSymmetry
    from attnconv.analysis.arrangements import TurnedHeads as TurnedHeads
    from attnconv.analysis.arrangements import mirror_partners as mirror_partners
    from attnconv.analysis.arrangements import mirror_symmetry as mirror_symmetry
    from attnconv.analysis.arrangements import turned_heads as turned_heads
    from attnconv.analysis.auditing import Audit as Audit
    from attnconv.analysis.auditing import LayerAudit as LayerAudit
    from attnconv.analysis.auditing import audit as audit
    from attnconv.analysis.conv_start import LayerStart as LayerStart
    from attnconv.analysis.conv_start import start_as_convolution as start_as_convolution
    from attnconv.analysis.convolved_attention import ConvolvedAttention as ConvolvedAttention
    from attnconv.analysis.head_statistics import LayerStatistics as LayerStatistics
    from attnconv.analysis.head_statistics import RunningStatistics as RunningStatistics
    from attnconv.analysis.head_statistics import layer_statistics as layer_statistics
    from attnconv.analysis.layer_trends import LayerTrend as LayerTrend
    from attnconv.analysis.layer_trends import layer_trend as layer_trend
    from attnconv.analysis.moments import AttentionMoments as AttentionMoments
    from attnconv.analysis.moments import attention_moments as attention_moments
    from attnconv.analysis.moments import sample_queries as sample_queries
    from attnconv.analysis.operators_of import attention_operators as attention_operators
    from attnconv.analysis.operators_of import content_layers as content_layers
    from attnconv.analysis.operators_of import visit_operators as visit_operators
    from attnconv.analysis.pruning import condition_numbers as condition_numbers
    from attnconv.analysis.pruning import degenerate_heads as degenerate_heads
    from attnconv.analysis.pruning import heads_to_prune as heads_to_prune
    from attnconv.analysis.pruning import prune_heads as prune_heads
    from attnconv.analysis.pruning import settings_after_pruning as settings_after_pruning
    from attnconv.analysis.query_maps import QueryMaps as QueryMaps
    from attnconv.analysis.query_maps import mean_query_maps as mean_query_maps
    from attnconv.analysis.reading import visit_attention as visit_attention
    from attnconv.analysis.replacing import HeadCandidate as HeadCandidate
    from attnconv.analysis.replacing import Replacement as Replacement
    from attnconv.analysis.replacing import replace_heads as replace_heads
    from attnconv.analysis.shift_profiles import RunningShiftProfile as RunningShiftProfile
    from attnconv.analysis.shift_profiles import ShiftProfile as ShiftProfile
    from attnconv.analysis.shift_profiles import shift_profile as shift_profile
    from attnconv.analysis.tap_assignment import convolution_score as convolution_score
    from attnconv.analysis.tap_assignment import grid_coverage as grid_coverage
    from attnconv.analysis.token_operator import TokenOperator as TokenOperator
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "Audit": "auditing",
            "AttentionMoments": "moments",
            "ConvolvedAttention": "convolved_attention",
            "HeadCandidate": "replacing",
            "LayerStart": "conv_start",
            "LayerAudit": "auditing",
            "LayerStatistics": "head_statistics",
            "LayerTrend": "layer_trends",
            "MirrorSymmetry": "arrangements",
            "QueryMaps": "query_maps",
            "Replacement": "replacing",
            "RunningShiftProfile": "shift_profiles",
            "RunningStatistics": "head_statistics",
            "ShiftProfile": "shift_profiles",
            "TokenOperator": "token_operator",
            "TurnedHeads": "arrangements",
            "attention_moments": "moments",
            "attention_operators": "operators_of",
            "audit": "auditing",
            "condition_numbers": "pruning",
            "content_layers": "operators_of",
            "degenerate_heads": "pruning",
            "heads_to_prune": "pruning",
            "convolution_score": "tap_assignment",
            "grid_coverage": "tap_assignment",
            "layer_statistics": "head_statistics",
            "layer_trend": "layer_trends",
            "mean_query_maps": "query_maps",
            "mirror_partners": "arrangements",
            "mirror_symmetry": "arrangements",
            "prune_heads": "pruning",
            "replace_heads": "replacing",
            "sample_queries": "moments",
            "settings_after_pruning": "pruning",
            "shift_profile": "shift_profiles",
            "start_as_convolution": "conv_start",
            "turned_heads": "arrangements",
            "visit_attention": "reading",
            "visit_operators": "operators_of",
        },
    )
