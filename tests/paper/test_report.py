import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from attnconv import from_conv
from attnconv.encodings.registry import ENCODING_NAMES
from attnconv.inspect import LayerStatistics, attention_operators, layer_statistics
from attnconv.models.operation_counts import parameters
from attnconv.models.settings import ModelSettings
from attnconv.paper import write_paper
from attnconv.paper.figures import FIGURES
from attnconv.paper.tables import (
    ENCODINGS_OF,
    PAPER_TABLE_2,
    table_of_accuracy,
    table_of_counts,
    table_of_encodings,
    table_of_fixed_shifts,
    table_of_hyper_parameters,
    table_of_trainings,
)
from attnconv.paper.training_plan import PAPER_MODELS
from attnconv.report.run_data import RunData
from attnconv.training.run_folder import RunFolder, write_json
from tests.report.making import SMALL, SMALL_RESNET, make_run
from tests.report.test_html_page import read
from tests.report.test_run_report import EXTERNAL

JUDGED = {"observations", "observations-by-layer"}


def study(**runs: list[RunFolder]) -> dict[str, list[RunData]]:
    return {name: [RunData(name, run) for run in several] for name, several in runs.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report from runs of all models of the paper, except the pruned model and the model with 16 heads."""
    base = tmp_path_factory.mktemp("paper")
    models: dict[str, ModelSettings] = {
        "resnet18": SMALL_RESNET,
        "quadratic": SMALL,
        "quadratic-generalized": replace(SMALL, encoding="quadratic-generalized"),
        "learned": replace(SMALL, encoding="learned"),
        "learned-content": replace(SMALL, encoding="learned-content"),
    }
    runs = {name: [make_run(base / name, model)] for name, model in models.items()}
    return write_paper(runs, base / "out", command="attnconv reproduce --scale tiny").parent


def statistics_of(layer: nn.Module) -> LayerStatistics:
    (operator,) = attention_operators(layer, torch.zeros(1, 2, 8, 8)).values()
    return layer_statistics(operator)


class TestFolder:
    def test_each_figure_lies_under_its_number_and_the_others_are_named(self, folder: Path) -> None:
        drawn = {int(path.stem.removeprefix("figure-")) for path in (folder / "figures").glob("*.png")}
        assert drawn == set(FIGURES) - {14}
        assert all(path.with_suffix(".svg").is_file() for path in (folder / "figures").glob("*.png"))
        for text in (
            read((folder / "index.html").read_text(encoding="utf-8")).text,
            (folder / "README.md").read_text(encoding="utf-8"),
        ):
            assert "Figure 14: no run of quadratic-16-heads" in text
            assert "attnconv reproduce --scale tiny --only quadratic-16-heads" in text
            assert "Figure 13: no run of quadratic-generalized-pruned" in text
            assert "Figure 12: no run" not in text

    def test_the_page_needs_nothing_else(self, folder: Path) -> None:
        html = (folder / "index.html").read_text(encoding="utf-8")
        assert EXTERNAL.search(html) is None
        page = read(html)
        links = [str(anchor["href"]) for anchor in page.all("a")]
        assert len(links) == 2 * 13
        assert all((folder / link).is_file() for link in links)
        assert "SA learned emb. + content" in page.text
        assert "Settings" not in page.text

    def test_tables_are_json_and_markdown(self, folder: Path) -> None:
        names = {path.stem for path in (folder / "tables").glob("*.md")}
        assert names == {*(f"table-{i}" for i in range(1, 5)), "trainings", "counts", "fixed-shifts", *JUDGED}
        rows = json.loads((folder / "tables" / "table-1.json").read_text(encoding="utf-8"))["rows"]
        assert [row["paper"]["accuracy"] for row in rows] == [0.938, 0.938, 0.918, 0.871]
        assert [row["here"]["accuracy"] for row in rows] == [0.875] * 4
        assert rows[1]["here"]["parameters"] == parameters(SMALL)

    def test_a_figure_of_an_earlier_call_does_not_stay(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "figures").mkdir()
        for ending in (".png", ".svg", ".pdf"):
            (tmp_path / "figures" / f"figure-04{ending}").write_bytes(b"old")
        write_paper({}, tmp_path)
        assert sorted(path.name for path in (tmp_path / "figures").glob("*.png")) == ["figure-01.png", "figure-11.png"]
        assert list((tmp_path / "figures").glob("figure-04.*")) == []

    def test_publication(self, tmp_path: Path) -> None:
        page = write_paper({}, tmp_path, publication=True)
        assert (tmp_path / "figures" / "figure-11.pdf").is_file()
        assert "<text" in (tmp_path / "figures" / "figure-11.svg").read_text(encoding="utf-8")
        assert 'href="figures/figure-11.pdf">PDF</a>' in page.read_text(encoding="utf-8")

    def test_images_that_are_not_there_are_told(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run", replace(SMALL, encoding="learned-content"))
        record = run.record()
        record["settings"]["data"].update(name="cifar10", root=str(tmp_path / "nowhere"), cache="off")
        run.settings_file.write_text(json.dumps(record), encoding="utf-8")
        text = (write_paper({"learned-content": [run]}, tmp_path / "out").parent / "README.md").read_text("utf-8")
        assert "Figure 6 could not be drawn" in text
        assert "Figure 6 in numbers, learned-content: could not be measured" in text
        assert f"got {tmp_path / 'nowhere'}" in text
        given = str(tmp_path / "given")
        page = write_paper({"learned-content": [run]}, tmp_path / "out", data_root=given)
        assert f"got {given}" in (page.parent / "README.md").read_text("utf-8")

    def test_an_unknown_model_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"runs: .*quadratic.* got vgg"):
            write_paper({"vgg": []}, tmp_path / "out")


class TestTables:
    def test_what_the_presets_count_rounds_to_what_the_paper_prints(self) -> None:
        ours = {row[0]: row for row in table_of_counts().table.rows}
        assert ours["SA quadratic emb."][1:4] == ("12.1M", "12,086,844", "6.2B")
        for model in PAPER_MODELS.values():
            if model.accuracy is not None:
                size, operations = (int(ours[model.title][column].replace(",", "")) for column in (2, 4))
                assert model.parameters == f"{size / 1e6:.1f}M"
                assert model.flops == f"{operations / 1e9:.1f}B".replace("15.0B", "15B")

    def test_the_preset_has_the_papers_hyper_parameters(self) -> None:
        values = table_of_hyper_parameters().values
        printed = {name: number for name, number, _ in PAPER_TABLE_2}
        assert values["preset quadratic"] == values["paper"] == printed

    def test_heads_that_differ_are_listed(self, tmp_path: Path) -> None:
        run = RunData("quadratic", make_run(tmp_path / "run", replace(SMALL, layers=2, heads=(7, 5))))
        assert table_of_hyper_parameters(run).values["the run here"]["number of heads"] == "7, 5"

    def test_seeds_are_a_mean_with_their_deviation(self, tmp_path: Path) -> None:
        found = [0.8, 0.9, 0.85]
        runs = [make_run(tmp_path / str(seed)) for seed in range(3)]
        for run, accuracy in zip(runs, found, strict=True):
            result = run.result()
            assert result is not None
            result["best"]["test"]["accuracy"] = accuracy
            write_json(run.result_file, result)
        table = table_of_accuracy(study(quadratic=runs), 1)
        assert table.table.rows[1][2] == f"{np.mean(found):.3f} ± {np.std(found, ddof=1):.3f}"
        assert table.table.rows[1][3].endswith(", 3 runs")
        assert table.table.rows[0][2] == "-"

    def test_a_run_that_is_not_complete_has_no_accuracy(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run", complete=False)
        assert table_of_accuracy(study(quadratic=[run]), 4).table.rows[1][2:4] == (
            "-",
            "quadratic-digits, 0 runs complete",
        )

    def test_trainings_say_both_epochs_time_and_device(self, tmp_path: Path) -> None:
        runs = [make_run(tmp_path / str(seed), seed=seed, threads=2) for seed in (42, 43)]
        runs.append(make_run(tmp_path / "begun", complete=False, seed=44))
        found = table_of_trainings(study(quadratic=runs, learned=runs[2:]))
        (row,) = found.table.rows
        assert row[1:4] == ("2", "81.2 ± 0.0 %", "87.5 ± 0.0 %")
        assert row[5:] == ("123.1 ± 0.0", f"cpu: a processor, threads: 2, {runs[0].settings().train.precision}")
        write_json(runs[0].settings_file, {**runs[0].record(), "used_precision": "32"})
        assert table_of_trainings(study(quadratic=runs[:1])).table.rows[0][-1] == "cpu: a processor, threads: 2, 32"
        (values,) = found.values["rows"]
        assert (values["seeds"], values["last"], values["chosen"]) == ([42, 43], [0.8125] * 2, [0.875] * 2)

    def test_table_3_names_encodings_that_there_are(self) -> None:
        assert {name for *_, names in ENCODINGS_OF for name in names} == set(ENCODING_NAMES)
        assert table_of_encodings().table.rows[3] == ("Dai et al. (2019)", "sinusoids", "yes", "sinusoidal")


class TestFixedShifts:
    def test_a_convolution_holds_all_its_shifts(self) -> None:
        layer = statistics_of(from_conv(nn.Conv2d(2, 2, 3, padding=1)))
        values = table_of_fixed_shifts({"m": [layer]}).values["models"]["m"]
        assert [head["head"] for head in values] == list(range(9))  # indices from 0, as in the audit
        shifts = {tuple(head["best_shift"]) for head in values if head["fixed"]}
        assert shifts == {(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)}

    def test_random_attention_holds_none(self) -> None:
        torch.manual_seed(0)
        layer = statistics_of(from_conv(nn.Conv2d(2, 2, 3, padding=1), alpha=0.01))
        assert table_of_fixed_shifts({"m": [layer]}).table.rows == (("m", "0", "0 of 9", "none"),)

    def test_broken_numbers_are_not_fixed(self) -> None:
        layer = statistics_of(from_conv(nn.Conv2d(2, 2, 1)))
        found = table_of_fixed_shifts({"m": [replace(layer, constancy=torch.full((1,), math.nan).double())]})
        assert found.table.rows == (("m", "0", "0 of 1", "none"),)

    def test_the_table_names_head_shift_and_mass(self) -> None:
        layer = statistics_of(from_conv(nn.Conv2d(2, 2, 1)))
        one = replace(layer, best_shift=torch.tensor([[0, -1]]), shift_mass=torch.tensor([0.8]).double())
        assert table_of_fixed_shifts({"one": [one]}).table.rows == (("one", "0", "1 of 1", "head 0 at (0, -1): 80%"),)
