"""Building blocks of operators: matrix products, banded long axes, block sizes and derivatives."""
