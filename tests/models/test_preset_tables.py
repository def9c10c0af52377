"""Tables of presets, as the paper prints them."""

from dataclasses import replace

from attnconv.models.preset_tables import Table, hyper_parameters, table_of_presets
from attnconv.models.presets import PRESETS
from attnconv.models.settings import AttentionSettings


def test_hyper_parameters_are_the_papers() -> None:
    assert hyper_parameters(AttentionSettings()) == {
        "number of layers": "6",
        "number of heads": "9",
        "hidden dimension": "400",
        "intermediate dimension": "512",
        "invertible pooling width": "2",
        "dropout probability": "0.1",
        "layer normalization epsilon": "1e-12",
    }


def test_heads_that_differ_are_all_named() -> None:
    settings = replace(AttentionSettings(), layers=2, heads=(7, 5))
    assert hyper_parameters(settings)["number of heads"] == "7, 5"


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
