"""Each observation on runs that show it, and on runs that show the opposite."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnconv.encodings.quadratic import GeneralizedQuadratic, Quadratic
from attnconv.inspect.auditing import json_values
from attnconv.layers.self_attention import SelfAttention
from attnconv.models.checkpoint import save_weights
from attnconv.models.model_loader import load as load_model
from attnconv.models.settings import AttentionSettings
from attnconv.paper.observations import (
    CLAIMS,
    MARGIN,
    Claim,
    Found,
    Observation,
    no_gain,
    observe,
    table_of_layers,
    table_of_observations,
    vote,
)
from attnconv.paper.training_plan import ALL_RUNS, DROPPED, PRUNED, SOURCE
from attnconv.report import run_data
from attnconv.report.run_data import RunData
from attnconv.surgery.head_pruning import attention_layers, condition_numbers
from attnconv.training.run_folder import RunFolder, write_json
from tests.report.making import SMALL, make_run

NINE = replace(SMALL, heads=9)
KERNEL = [(float(row), float(column)) for row in (-1, 0, 1) for column in (-1, 0, 1)]
Placing = Callable[[int], Sequence[tuple[float, float]]]  # layer -> centres


def hard(run: RunFolder, places: Placing, *, spread: float = 7.0) -> RunFolder:
    """Set the centres of a quadratic run's heads and make the heads sharp."""

    def place(layer: SelfAttention, number: int) -> None:
        assert isinstance(layer.encoding, Quadratic)
        layer.encoding.centres.copy_(torch.tensor(places(number)))
        layer.encoding.spread.fill_(spread)

    return changed(run, place)


def changed(run: RunFolder, change: Callable[[SelfAttention, int], None]) -> RunFolder:
    loaded = load_model(run.last_weights)
    assert loaded.settings is not None
    with torch.no_grad():
        for number, layer in enumerate(attention_layers(loaded.model).values()):
            change(layer, number)
    save_weights(run.last_weights, loaded.model, loaded.settings, mean=(0.5,), std=(0.25,))
    return run


def scored(run: RunFolder, **accuracy: float) -> RunFolder:
    """Set the test accuracies of `start`, `last`, `best`."""
    result: dict[str, Any] = dict(run.result() or {})
    for state, value in accuracy.items():
        result[state] = {"epoch": 1, "test": {"loss": 1.0, "accuracy": value, "images": 100}}
    write_json(run.result_file, result)
    return run


def answers(runs: Mapping[str, Sequence[RunFolder]], claims: Sequence[Claim] = CLAIMS) -> dict[str, Observation]:
    study = {name: [RunData(name, run) for run in several] for name, several in runs.items()}
    return {one.claim.key: one for one in observe(study, claims)}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Observation]:
    """Observations of two runs: layer 0 has the shifts of a 3 x 3 kernel, layer 1 shifts three times as large."""
    base = tmp_path_factory.mktemp("kernels")
    further = [(3 * row, 3 * column) for row, column in KERNEL]
    runs = [
        hard(make_run(base / str(seed), NINE, seed=seed), lambda layer: further if layer else KERNEL)
        for seed in (42, 43)
    ]
    return answers({"quadratic": runs})


class TestClaims:
    def test_they_ask_for_runs_that_there_are(self) -> None:
        assert {name for claim in CLAIMS for name in claim.models} <= set(ALL_RUNS)
        assert len({claim.key for claim in CLAIMS}) == len(CLAIMS)

    def test_without_runs_nothing_is_said(self) -> None:
        found = answers({})
        assert {one.verdict for one in found.values()} == {"undecided"}
        assert found["content"].problems == ("no complete run of learned-content",)
        table = table_of_observations(list(found.values())).table
        assert {row[3] for row in table.rows} == {"-"}
        assert table_of_layers(list(found.values())).table.rows == ()


class TestVerdicts:
    def test_seeds_that_disagree_cannot_say(self) -> None:
        assert vote([True, True, True]) == "holds"
        assert vote([False, False]) == "not seen"
        assert vote([True, False]) == vote([True, None]) == vote([]) == "undecided"

    def test_a_gain_is_judged_by_its_interval(self) -> None:
        assert no_gain([-0.01, -0.011, -0.009]) == "holds"
        assert no_gain([MARGIN, MARGIN + 0.001, MARGIN - 0.001]) == "does not hold"
        assert no_gain([0.0, 0.02, -0.02]) == no_gain([-0.5]) == "undecided"


class TestHeads:
    def test_a_kernel_that_widens_shows_what_the_paper_saw(self, kernels: dict[str, Observation]) -> None:
        fixed = kernels["fixed shifts: quadratic"]
        assert fixed.verdict == "holds"
        assert [found.beside["at the start"] for found in fixed.found.values()] == [0.0, 0.0]
        centres = kernels["centres: 9 heads"]
        assert centres.verdict == "holds"
        for found in centres.found.values():
            near, far = found.layers
            assert near < far
        assert kernels["reach: 9 heads"].verdict == "holds"
        assert kernels["overlap: 9 heads"].verdict == "holds"

    def test_heads_that_all_look_alike_overlap(self, tmp_path: Path) -> None:
        run = hard(make_run(tmp_path / "run", NINE), lambda layer: [(1.0 - layer, 1.0 - layer)] * 9)
        found = answers({"quadratic": [run]})
        assert found["overlap: 9 heads"].verdict == "not seen"
        assert found["coverage: 9 heads"].verdict == "not seen"
        assert found["centres: 9 heads"].verdict == "not seen"  # layer 1 attends to the query itself

    def test_a_layer_of_kernels_covers_them(self, tmp_path: Path) -> None:
        run = hard(make_run(tmp_path / "run", NINE), lambda layer: KERNEL)
        coverage = answers({"quadratic": [run]})["coverage: 9 heads"]
        assert coverage.verdict == "holds"
        assert coverage.values[0] == pytest.approx(1.0, abs=1e-6)

    def test_flat_heads_hold_no_shift(self, tmp_path: Path) -> None:
        run = hard(make_run(tmp_path / "run", NINE), lambda layer: KERNEL, spread=0.01)
        assert answers({"quadratic": [run]})["fixed shifts: quadratic"].verdict == "not seen"

    def test_layers_that_there_are_not_cannot_be_judged(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(run_data, "IMAGES", 4)
        run = make_run(tmp_path / "run", replace(SMALL, encoding="learned-content"))
        found = answers({"learned-content": [run]})
        assert found["fixed shifts: learned + content"].verdict == "undecided"  # the model has no layers 2 and 3
        assert all(0 <= share <= 1 for share in found["content"].found[42].layers)

    @pytest.mark.parametrize(("axis", "verdict"), [(1, "holds"), (0, "not seen")])
    def test_scores_that_are_even_along_an_axis_are_symmetric(self, tmp_path: Path, axis: int, verdict: str) -> None:
        def even(layer: SelfAttention, number: int) -> None:
            for name, table in layer.encoding.named_parameters():
                table.mul_(3.0)  # sharp enough to distinguish the flips
                if name == f"tables.{axis}":
                    table.copy_((table + table.flip(0)) / 2)

        run = changed(make_run(tmp_path / "run", replace(SMALL, encoding="learned")), even)
        assert answers({"learned": [run]})["mirror images"].verdict == verdict

    def test_ellipses_are_measured_by_their_axes(self, tmp_path: Path) -> None:
        def stretch(layer: SelfAttention, number: int) -> None:
            assert isinstance(layer.encoding, GeneralizedQuadratic)
            layer.encoding.root_precision.copy_(
                torch.diag_embed(torch.tensor([[1.0, 2.0 + number + 0.1 * head] for head in range(layer.heads)]))
            )

        run = changed(make_run(tmp_path / "run", replace(SMALL, encoding="quadratic-generalized")), stretch)
        found = answers({SOURCE: [run]})["ellipses"]
        assert found.verdict == "holds"
        assert found.found[42].layers == pytest.approx(((2.1**2 + 2.2**2) / 2, (3.1**2 + 3.2**2) / 2), rel=1e-5)
        assert found.found[42].beside["at the start"] == pytest.approx(1.0, abs=0.1)

    def test_a_singular_covariance_has_no_bound(self) -> None:
        encoding = GeneralizedQuadratic(2)
        encoding.root_precision.data.copy_(torch.diag_embed(torch.tensor([[1.0, 0.0], [0.0, 0.0]])))
        assert condition_numbers(encoding).tolist() == [math.inf, 1.0]


def judged(runs: Mapping[str, Sequence[RunFolder]]) -> dict[str, Observation]:
    """Return only the observations about accuracies, because the heads of these runs are arbitrary."""
    return answers(runs, [claim for claim in CLAIMS if claim.unit == "points"])


class TestAccuracies:
    @pytest.fixture
    def pruned(self, tmp_path: Path) -> dict[str, list[RunFolder]]:
        model = replace(SMALL, encoding="quadratic-generalized")
        assert isinstance(model, AttentionSettings)
        source = scored(make_run(tmp_path / "source", model), last=0.8, best=0.81)
        run = make_run(tmp_path / "pruned", replace(model, heads=(4, 2)))
        return {SOURCE: [source], PRUNED: [scored(run, start=0.7, last=0.797)]}

    def test_pruning_dips_and_recovers(self, pruned: dict[str, list[RunFolder]]) -> None:
        found = judged(pruned)
        dip, recovery = found["dip after pruning"], found["recovery after pruning"]
        assert (dip.verdict, recovery.verdict) == ("holds", "holds")
        assert dip.values[0] == pytest.approx(-0.1)
        assert dip.found[42].layers == (0.0, 2.0)

    def test_a_loss_that_stays_is_no_recovery(self, pruned: dict[str, list[RunFolder]]) -> None:
        scored(pruned[PRUNED][0], start=0.8, last=0.79)
        found = judged(pruned)
        assert found["recovery after pruning"].verdict == "not seen"
        assert found["dip after pruning"].verdict == "not seen"  # accuracy did not drop at first

    def test_a_start_that_nobody_measured_is_told(self, pruned: dict[str, list[RunFolder]]) -> None:
        result = dict(pruned[PRUNED][0].result() or {})
        del result["start"]
        write_json(pruned[PRUNED][0].result_file, result)
        dip = judged(pruned)["dip after pruning"]
        assert dip.verdict == "undecided"
        assert "start weights, got " in dip.problems[0]

    def test_accuracies_are_compared_seed_by_seed(self, tmp_path: Path) -> None:
        plain = {42: 0.80, 43: 0.82, 44: 0.81}
        runs = {
            name: [
                scored(make_run(tmp_path / f"{name}-{seed}", seed=seed), best=value + more)
                for seed, value in plain.items()
            ]
            for name, more in (("quadratic", 0.0), (DROPPED, 0.02))
        }
        found = judged({"quadratic": runs["quadratic"], DROPPED: runs[DROPPED][::-1]})
        gain = found["no gain from attention dropout"]
        assert gain.values == pytest.approx((0.02,) * 3)
        assert gain.verdict == "does not hold"
        alone = judged({"quadratic": runs["quadratic"][:1], DROPPED: runs[DROPPED][1:]})
        assert "no seed with complete runs" in alone["no gain from attention dropout"].problems[0]

    def test_runs_that_are_not_complete_do_not_count(self, tmp_path: Path) -> None:
        found = judged({name: [make_run(tmp_path / name, complete=False)] for name in ("quadratic", DROPPED)})
        problem = "no complete run of quadratic-attention-dropout, quadratic"
        assert found["no gain from attention dropout"].problems == (problem,)


class TestTables:
    def test_numbers_have_their_deviation_and_unit(self) -> None:
        share = next(claim for claim in CLAIMS if claim.key == "coverage: 9 heads")
        seeds = {42: Found(0.5, {"chance": 0.25}, True, (0.4, 0.6)), 43: Found(0.6, {"chance": 0.25}, True, (0.4, 0.8))}
        one = Observation(share, seeds)
        (row,) = table_of_observations([one]).table.rows
        assert row[3:6] == ("55.0 ± 7.1 %", "chance 25.0 ± 0.0 %", "quadratic; seeds 42, 43")
        assert row[-1] == "holds"
        assert table_of_layers([one]).table.rows[0][2:] == ("40.0 ± 0.0 %", "70.0 ± 14.1 %")
        points = next(claim for claim in CLAIMS if claim.no_gain)
        (row,) = table_of_observations([Observation(points, {42: Found(0.012, {"a": 0.9})})]).table.rows
        assert row[3:5] == ("+1.20 points", "a 90.0 %")

    def test_numbers_of_other_magnitudes_have_no_mean(self) -> None:
        ellipses = next(claim for claim in CLAIMS if claim.key == "ellipses")
        seeds = {seed: Found(0.1, {}, True, (2.0, top)) for seed, top in ((42, 3.0), (43, 7.6e12))}
        assert table_of_layers([Observation(ellipses, seeds)]).table.rows[0][2:] == ("2.00 ± 0.00", "3.00 to 7.6e+12")

    def test_values_are_json(self, kernels: dict[str, Observation]) -> None:
        broken = Observation(CLAIMS[0], {42: Found(math.nan, {"chance": math.inf}, None, (math.nan,))})
        text = json.dumps(json_values(table_of_observations([*kernels.values(), broken]).values), allow_nan=False)
        rows = {row["observation"]: row for row in json.loads(text)["rows"]}
        assert rows["overlap: 9 heads"]["seeds"]["43"]["meets"] is True
        assert rows[CLAIMS[0].key]["mean"] is None
        assert "unknown" in table_of_observations([broken]).table.rows[0][3]
