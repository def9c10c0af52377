"""Evaluation mode for a while: each module keeps its own mode, whatever happens in between."""

import pytest
from torch import nn

from attnconv._util.eval_mode import evaluating


def test_every_module_is_put_back() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm1d(2)))
    model[1].eval()
    before = [module.training for module in model.modules()]
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before == [True, True, False, False]
    with pytest.raises(NotImplementedError), evaluating(model):
        nn.Module()(model)
    assert [module.training for module in model.modules()] == before
