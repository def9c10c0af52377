from .ablation_effects import HeadEffect as HeadEffect, HeadEffects as HeadEffects, head_effects as head_effects
from .convolution_start import LayerStart as LayerStart
from .convolved_attention import ConvolvedAttention as ConvolvedAttention
from .head_ablation import HeadChange as HeadChange, ablated as ablated
from .head_pruning import (
    condition_numbers as condition_numbers,
    degenerate_heads as degenerate_heads,
    prune_heads as prune_heads,
    settings_after_pruning as settings_after_pruning,
)
from .head_replacement import HeadCandidate as HeadCandidate, Replacement as Replacement, replace_heads as replace_heads
from .initialisation import initialize as initialize
