"""Colours and marks that stay apart for every reader.

Nine hues that keep their distance under the common forms of colour blindness (Okabe and Ito's, without the yellow that
vanishes on white and the black that is kept for the query pixel; wine, indigo and olive from Tol's set), and eight
shapes. Head i takes hue i mod 9 and shape i mod 8, so that the pair repeats only after 72 heads and colour is never
alone.
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


def colour_of(index: int) -> str:
    """Hue of the head or run with this number, counted from 0."""
    return COLOURS[index % len(COLOURS)]


def shape_of(index: int) -> str:
    """Matplotlib marker of the head or run with this number, counted from 0."""
    return SHAPES[index % len(SHAPES)]


def size_of(index: int) -> float:
    """Size in points at which this head's mark looks as large as the others: crosses and triangles need more."""
    return {"^": 6.0, "v": 6.0, "P": 6.6, "X": 6.6, "D": 4.8, "s": 5.0}.get(shape_of(index), 5.6)
