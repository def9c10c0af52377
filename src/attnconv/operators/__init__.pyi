from .base import AttentionOperator as AttentionOperator
from .content import Content as Content, attention_with_relative_bias as attention_with_relative_bias
from .dense import Dense as Dense
from .kronecker import Kronecker as Kronecker
from .shift import Shift as Shift
from .toeplitz import Toeplitz as Toeplitz
