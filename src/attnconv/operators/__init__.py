"""Attention operators: matrices of attention probabilities that know their structure."""

from typing import TYPE_CHECKING

from attnconv._lazy import attach

if TYPE_CHECKING:
    from attnconv.operators.base import AttentionOperator as AttentionOperator
    from attnconv.operators.biased import attention_with_relative_bias as attention_with_relative_bias
    from attnconv.operators.content import Content as Content
    from attnconv.operators.dense import Dense as Dense
    from attnconv.operators.kronecker import Kronecker as Kronecker
    from attnconv.operators.shift import Shift as Shift
    from attnconv.operators.toeplitz import Toeplitz as Toeplitz
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "AttentionOperator": "base",
            "Content": "content",
            "Dense": "dense",
            "Kronecker": "kronecker",
            "Shift": "shift",
            "Toeplitz": "toeplitz",
            "attention_with_relative_bias": "biased",
        },
    )
