from .error_bounds import alpha_for as alpha_for, error_bound as error_bound, mass_off as mass_off
from .expressibility import (
    Expressiveness as Expressiveness,
    Factorisation as Factorisation,
    can_express as can_express,
    factorise as factorise,
)
from .lemma3_best_weights import (
    Fit as Fit,
    Residuals as Residuals,
    imitate as imitate,
    imitation_error as imitation_error,
)
