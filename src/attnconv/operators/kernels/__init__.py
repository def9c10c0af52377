"""How the operators are computed: tiles, bands, transforms, and their derivatives."""
