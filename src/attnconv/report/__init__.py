"""The paper's figures from a run folder, as files and as one HTML page.

`write_report` does all of it for one run, `write_paper` the paper's whole set from several. The drawing functions take
plain arrays and give a matplotlib figure each, which `save` writes as PNG and SVG.
"""

from typing import TYPE_CHECKING

from attnconv._lazy import attach

if TYPE_CHECKING:
    from attnconv.report.accuracy import Curve as Curve
    from attnconv.report.accuracy import draw_accuracy as draw_accuracy
    from attnconv.report.attention_maps import LayerMaps as LayerMaps
    from attnconv.report.attention_maps import draw_attention_maps as draw_attention_maps
    from attnconv.report.audit_figures import draw_profiles as draw_profiles
    from attnconv.report.audit_figures import draw_scores as draw_scores
    from attnconv.report.audit_page import write_audit as write_audit
    from attnconv.report.canvas import save as save
    from attnconv.report.centres import draw_centres as draw_centres
    from attnconv.report.centres_over_training import draw_centres_over_training as draw_centres_over_training
    from attnconv.report.factorisation import draw_factorisation as draw_factorisation
    from attnconv.report.gaussians import HeadGaussians as HeadGaussians
    from attnconv.report.mixture import draw_mixture as draw_mixture
    from attnconv.report.paper import write_paper as write_paper
    from attnconv.report.runs import write_comparison as write_comparison
    from attnconv.report.write import write_report as write_report
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "Curve": "accuracy",
            "HeadGaussians": "gaussians",
            "LayerMaps": "attention_maps",
            "draw_accuracy": "accuracy",
            "draw_centres": "centres",
            "draw_attention_maps": "attention_maps",
            "draw_centres_over_training": "centres_over_training",
            "draw_factorisation": "factorisation",
            "draw_mixture": "mixture",
            "draw_profiles": "audit_figures",
            "draw_scores": "audit_figures",
            "save": "canvas",
            "write_audit": "audit_page",
            "write_comparison": "runs",
            "write_paper": "paper",
            "write_report": "write",
        },
    )
