"""Table of presets, as printed by `attnconv models`."""

from attnconv.models.preset_tables import Table, table_of_presets
from attnconv.models.presets import PRESETS


def test_the_table_of_presets_has_every_preset() -> None:
    table = table_of_presets()
    assert [row[0] for row in table.rows] == list(PRESETS)
    assert table.rows[1][:4] == ("quadratic", "12,086,844", "6,175,956,800", "9,007,112,000")


def test_markdown() -> None:
    table = Table("t", ("name", "count", "text"), (("a", "1,000", "x | y"), ("b", "2.5", "9 z")))
    assert table.markdown().splitlines() == [
        "| name | count | text |",
        "|:---|---:|:---|",
        "| a | 1,000 | x &#124; y |",
        "| b | 2.5 | 9 z |",
    ]
    assert Table("t", ("name",), ()).markdown().splitlines() == ["| name |", "|:---|"]
