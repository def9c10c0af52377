"""Upload to the Hugging Face hub: files, the card, branches, and errors. Other networks are uploaded as documented."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from attnconv.models.checkpoint import save_weights
from attnconv.models.classifiers import build
from attnconv.models.hub_upload import save_to_hub
from attnconv.models.model_loader import load
from attnconv.models.presets import PRESETS
from attnconv.training.fitting import fit
from attnconv.training.run_folder import RunFolder
from tests.models.stand_in_hub import Hub
from tests.training.making import tiny

ROOT = Path(__file__).resolve().parents[2]
DIGITS = PRESETS["quadratic-digits"]
# The client passes a file to the HTTP library in a deprecated way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return fit(tiny(epochs=2, limit=60), tmp_path_factory.mktemp("run"), progress=False)


def test_a_run_comes_back_with_the_same_bits_and_a_card(run: RunFolder, hub: Hub) -> None:
    from huggingface_hub import ModelCard

    name = save_to_hub(run.path, "me/digits")
    assert re.fullmatch("hub:me/digits@[0-9a-f]{40}", name)
    before, after = load(run.path), load(name)
    assert after.source == name
    assert (after.settings, after.classes, after.mean) == (before.settings, before.classes, before.mean)
    states = before.model.state_dict(), after.model.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    files = hub.commits["me/digits"][name.rpartition("@")[2]]
    records = ("settings.json", "result.json", "metrics.jsonl", "heads.jsonl")
    assert set(files) == {"weights.safetensors", "README.md", *records}
    for record in records:
        assert hub.contents[files[record]] == (run.path / record).read_bytes()
    card = ModelCard.load("me/digits")
    result = run.result()
    assert result is not None
    (found,) = card.data.eval_results
    assert (found.metric_type, found.metric_value) == ("accuracy", result["best"]["test"]["accuracy"])
    assert (found.dataset_name, found.dataset_split, card.data.license) == ("digits", "test", "mit")
    assert "POST /api/validate-yaml" in hub.requests  # the client asks the hub before it uploads


def test_an_unchanged_run_gets_no_new_commit(run: RunFolder, hub: Hub) -> None:
    assert save_to_hub(run.path, "me/digits") == save_to_hub(run.path, "me/digits")
    assert len(hub.commits["me/digits"]) == 2  # the initial commit is empty


def test_a_branch_is_created_once_and_a_repository_can_be_private(run: RunFolder, hub: Hub, tmp_path: Path) -> None:
    first = save_to_hub(run.path, "me/digits", private=True, revision="next")
    save_weights(tmp_path / "w.safetensors", build(DIGITS), DIGITS)
    second = save_to_hub(tmp_path / "w.safetensors", "me/digits", revision="next", licence="cc-by-4.0")
    assert load("hub:me/digits@next").source == second != first
    assert hub.private == ["me/digits"]
    assert set(hub.commits["me/digits"][second.rpartition("@")[2]]) == {"weights.safetensors", "README.md"}
    with pytest.raises(OSError, match="Entry Not Found"):
        load("hub:me/digits")
    files = hub.commits["me/digits"][second.rpartition("@")[2]]
    assert '\nlicense: "cc-by-4.0"\n' in hub.contents[files["README.md"]].decode()


@pytest.mark.parametrize("repo", ["digits", "me/digits/more", "hub:digits"])
def test_a_repository_without_owner_is_rejected(repo: str, run: RunFolder) -> None:
    with pytest.raises(ValueError, match=f"repo: .*OWNER/NAME .*got {repo}"):
        save_to_hub(run.path, repo)


def test_weights_that_cannot_be_loaded_are_not_uploaded(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"model: .*got {re.escape(str(tmp_path))}"):
        save_to_hub(tmp_path, "me/digits")
    (tmp_path / "weights.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="checkpoint: "):
        save_to_hub(tmp_path, "me/digits")
    assert hub.requests == []


def test_an_upload_without_access_is_an_error_in_one_line(
    run: RunFolder, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "of-nobody")
    with pytest.raises(OSError, match=r"repo: .*got me/digits. Error from huggingface_hub: \w") as caught:
        save_to_hub(run.path, "me/digits")
    assert "\n" not in str(caught.value)
    assert hub.commits == {}


def test_a_missing_package_is_named_with_its_extra(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModuleNotFoundError, match=r"huggingface_hub: must be installed.*'attnconv\[hub\]'"):
        save_to_hub(run.path, "me/digits")


@pytest.mark.usefixtures("unhooked")
def test_the_documented_network_is_uploaded_and_loaded(hub: Hub) -> None:
    pytest.importorskip("jinja2")
    page = (ROOT / "docs" / "sharing.md").read_text(encoding="utf-8")
    (program,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "HubMixin" in block)
    names: dict[str, Any] = {"__name__": "documented"}
    exec(program, names)
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(names["again"](x), names["net"].eval()(x), rtol=0, atol=0)
    assert names["again"].attention.heads == 9
    assert set(hub.commits["OWNER/net"][hub.branches["OWNER/net"]["main"]]) >= {"config.json", "model.safetensors"}
