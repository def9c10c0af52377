"""Colours and markers that readers with any form of colour vision can tell apart.

Nine hues (Okabe and Ito's without yellow and black; wine, indigo and olive of Tol's set) and eight shapes. Head i has
hue i mod 9 and shape i mod 8: the pair repeats after 72 heads, and colour is never the only difference.
"""

COLOURS: tuple[str, ...] = (
    "#0072b2",  # blue
    "#d55e00",  # vermilion
    "#009e73",  # green
    "#cc79a7",  # pink
    "#e69f00",  # orange
    "#56b4e9",  # sky
    "#882255",  # wine
    "#332288",  # indigo
    "#999933",  # olive
)
SHAPES: tuple[str, ...] = ("o", "s", "^", "D", "v", "P", "X", "h")
_SIZES = {"^": 6.0, "v": 6.0, "P": 6.6, "X": 6.6, "D": 4.8, "s": 5.0}  # points at which shapes look equally large


def colour_of(index: int) -> str:
    """Hue of a head or run, counted from 0."""
    return COLOURS[index % len(COLOURS)]


def shape_of(index: int) -> str:
    """Matplotlib marker of a head or run, counted from 0."""
    return SHAPES[index % len(SHAPES)]


def size_of(index: int) -> float:
    """Marker size in points."""
    return _SIZES.get(shape_of(index), 5.6)
