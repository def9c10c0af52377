"""Subset STIX Two Math for the page's equations and write `src/fonts/math.css`.

    npm pack @fontsource/stix-two-math@5.3.0 && tar xzf fontsource-stix-two-math-5.3.0.tgz
    pip install fonttools==4.68.0 brotli
    python web/scripts/mathFont.py package/files/stix-two-math-latin-400-normal.woff2

The font is licensed under the SIL Open Font License, `src/fonts/OFL.txt`. The subset has the family name "Equations".
"""

import base64
import io
import string
import sys
from pathlib import Path

from fontTools.subset import Options, Subsetter
from fontTools.ttLib import TTFont

TARGET = Path(__file__).parents[1] / "src/fonts/math.css"
GREEK = "αβγδεθλμπρστφωΔΣ"
SIGNS = "−+=<>≤≥≈·×∑√‖|→∈⊤…∞∂^ˆ′〈〉⟨⟩"


def characters() -> str:
    """Return ASCII, Greek letters, operators, and italic letters, which browsers use for names of one letter."""
    italic = [chr(code) for code in range(0x1D434, 0x1D468)] + ["ℎ"]
    greek = [chr(0x1D6FC + ord(letter) - ord("α")) for letter in GREEK if letter >= "α"]
    return "".join([string.printable.strip(), *italic, *greek, chr(0x1D6E5), chr(0x1D6F4), GREEK, SIGNS, "\u00a0"])


def main(path: Path) -> None:
    """Write the subset as a style sheet with a data URI."""
    font = TTFont(path, recalcTimestamp=False)
    options = Options()
    options.hinting = False
    options.layout_features = ["ssty", "kern"]
    options.drop_tables += ["GPOS"]
    options.notdef_outline = True
    subsetter = Subsetter(options)
    subsetter.populate(text=characters())
    subsetter.subset(font)
    for record in font["name"].names:
        if record.nameID in (1, 3, 4, 6, 16):
            record.string = "Equations"
    font.flavor = "woff2"
    file = io.BytesIO()
    font.save(file)
    data = base64.b64encode(file.getvalue()).decode()
    source = f'url("data:font/woff2;base64,{data}") format("woff2")'
    TARGET.write_text(
        "/* A subset of STIX Two Math, written by scripts/mathFont.py; licence: OFL.txt. */\n"
        f'@font-face {{\n  font-family: "Equations";\n  src: {source};\n}}\n'
    )
    print(f"{TARGET}: {len(data)} characters of base64, {len(font.getGlyphOrder())} glyphs")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
