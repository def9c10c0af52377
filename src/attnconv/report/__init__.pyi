from .accuracy_curves import Curve as Curve, draw_accuracy as draw_accuracy
from .attention_maps import LayerMaps as LayerMaps, draw_attention_maps as draw_attention_maps
from .audit_report import draw_profiles as draw_profiles, draw_scores as draw_scores, write_audit as write_audit
from .effect_map import draw_effects as draw_effects
from .figure_style import save as save
from .head_centres import (
    HeadGaussians as HeadGaussians,
    draw_centres as draw_centres,
    draw_centres_over_training as draw_centres_over_training,
)
from .run_report import write_report as write_report
from .theory_figures import draw_factorisation as draw_factorisation, draw_mixture as draw_mixture
