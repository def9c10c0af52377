"""What operators are computed with: products, bands of long axes, sizes of blocks, derivatives."""
