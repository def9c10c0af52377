"""Checkpoints of the Hugging Face hub: names, verification, the cache and interrupted downloads."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from attnconv.cli import main
from attnconv.convert import recast
from attnconv.models.checkpoint import About, save_recast, save_weights
from attnconv.models.classifiers import build
from attnconv.models.model_loader import load
from attnconv.models.presets import PRESETS
from tests.models.stand_in_hub import Hub

ROOT = Path(__file__).resolve().parents[2]
LOAD = "import attnconv; print(attnconv.load('hub:me/digits').source)"
DIGITS, RESNET = PRESETS["quadratic-digits"], PRESETS["resnet-digits"]


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path]), **variables}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)


def weights(path: Path) -> bytes:
    save_weights(path, build(DIGITS), DIGITS, classes=tuple("0123456789"), mean=(0.3,), std=(0.4,))
    return path.read_bytes()


@pytest.fixture
def commit(hub: Hub, tmp_path: Path) -> str:
    """Commit with a checkpoint in the repository `me/digits`."""
    hub.create("me/digits")
    content = weights(tmp_path / "w.safetensors")
    return hub.commit("me/digits", "main", {"weights.safetensors": hub.store(content, large=True)})


def blob(commit: str, tmp_path: Path) -> Path:
    """Return the cached file to which the commit's folder links."""
    return (tmp_path / "hub-cache/models--me--digits/snapshots" / commit / "weights.safetensors").resolve()


def test_a_checkpoint_is_loaded_with_its_commit(hub: Hub, commit: str, tmp_path: Path) -> None:
    found, local = load("hub:me/digits"), load(tmp_path / "w.safetensors")
    assert found.source == f"hub:me/digits@{commit}"
    assert (found.settings, found.classes, found.mean, found.std) == (DIGITS, local.classes, local.mean, local.std)
    assert not found.random
    states = found.model.state_dict(), local.model.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    hub.requests.clear()
    assert load(found.source).source == found.source
    assert hub.requests == []  # a commit never changes, so the cached file is used


def test_a_revision_is_a_branch_or_a_commit(hub: Hub, commit: str, tmp_path: Path) -> None:
    other = hub.store(weights(tmp_path / "other.safetensors"), large=True)
    hub.branches["me/digits"]["next"] = commit
    newer = hub.commit("me/digits", "next", {"weights.safetensors": other})
    assert load("hub:me/digits@next").source == load(f"hub:me/digits@{newer}").source == f"hub:me/digits@{newer}"
    assert load("hub:me/digits").source == load("hub:me/digits@main").source == f"hub:me/digits@{commit}"


def test_a_small_file_and_a_recast_network_are_loaded(hub: Hub, tmp_path: Path) -> None:
    save_recast(tmp_path / "r.safetensors", recast(build(RESNET)), RESNET, about=About())
    hub.create("me/recast")
    etag = hub.store((tmp_path / "r.safetensors").read_bytes(), large=False)
    commit = hub.commit("me/recast", "main", {"weights.safetensors": etag})
    assert len(etag) == 40  # a git blob
    assert load("hub:me/recast").source == f"hub:me/recast@{commit}"


@pytest.mark.parametrize("large", [True, False])
def test_a_tampered_file_is_rejected_until_it_is_deleted(large: bool, hub: Hub, tmp_path: Path) -> None:
    content = weights(tmp_path / "w.safetensors")
    hub.create("me/digits")
    etag = hub.store(content, large=large)
    commit = hub.commit("me/digits", "main", {"weights.safetensors": etag})
    hub.contents[etag] = content[:-1] + bytes([content[-1] ^ 1])
    message = rf"checkpoint: .*checksum {etag}, got .* Delete .*{etag} and load"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            load("hub:me/digits")
    hub.contents[etag] = content
    blob(commit, tmp_path).unlink()
    assert load("hub:me/digits").source.endswith(commit)
    with blob(commit, tmp_path).open("r+b") as file:
        file.write(b"0")
    with pytest.raises(ValueError, match=message):
        load(f"hub:me/digits@{commit}")


def test_without_symbolic_links_nothing_is_compared(
    hub: Hub, commit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.are_symlinks_supported", lambda _: False)
    assert load("hub:me/digits").source.endswith(commit)
    assert not blob(commit, tmp_path).is_symlink()
    assert list(tmp_path.glob("hub-cache/**/blobs/*")) == []


def test_an_interrupted_download_is_resumed(hub: Hub, commit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)  # parts that are written at once
    hub.drop_after = 3000
    with suppress(OSError):  # clients before version 1 fail here, and continue in the next call
        load("hub:me/digits")
    assert load("hub:me/digits").source.endswith(commit)
    path = "GET /me/digits/resolve/main/weights.safetensors"
    assert hub.downloads() == [path, f"{path} bytes=3000-"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("me/nothing", "Repository Not Found"),
        ("me/digits@nothing", "Revision Not Found"),
        ("me/empty", "Entry Not Found"),
        ("me/a b", "Repo id must"),
    ],
)
def test_what_the_hub_does_not_have_is_named_in_one_line(name: str, reason: str, hub: Hub, commit: str) -> None:
    hub.create("me/empty")
    with pytest.raises(OSError, match=f"model: .*got hub:{name}. Error from huggingface_hub: {reason}") as caught:
        load(f"hub:{name}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "digits", "/digits", "me/", "a/b/c", "@main", "digits@main"])
def test_a_name_without_owner_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match=f"model: .*OWNER/NAME .*got hub:{name}"):
        load(f"hub:{name}")


def test_an_empty_revision_is_not_the_main_branch(hub: Hub, commit: str) -> None:
    with pytest.raises(OSError, match=r"model: .*got hub:me/digits@"):
        load("hub:me/digits@")


def test_a_pickle_is_rejected(hub: Hub, tmp_path: Path) -> None:
    torch.save(build(DIGITS).state_dict(), tmp_path / "w.pt")
    hub.create("me/pickle")
    etag = hub.store((tmp_path / "w.pt").read_bytes(), large=True)
    hub.commit("me/pickle", "main", {"weights.safetensors": etag})
    with pytest.raises(ValueError, match=r"checkpoint: .*got a pickle"):
        load("hub:me/pickle")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModuleNotFoundError, match=r"huggingface_hub: must be installed.*'attnconv\[hub\]'"):
        load("hub:me/digits")


def test_commands_accept_the_name(hub: Hub, commit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        main(["evaluate", "hub:me/nothing", "--data-name", "digits"])
    error = capsys.readouterr().err
    assert error.startswith("attnconv evaluate: MODEL: ")
    assert error.count("\n") == 1
    with pytest.raises(SystemExit, match="0"):
        main(["prune", "hub:me/digits"])
    assert capsys.readouterr().out.startswith(f"hub:me/digits@{commit}, ")


def test_environment_variables_select_the_server_and_offline_mode(hub: Hub, commit: str, tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    assert run(LOAD, **environment).stdout == f"hub:me/digits@{commit}\n"
    assert len(hub.downloads()) == 1
    hub.requests.clear()
    assert run(LOAD, HF_HUB_OFFLINE="1", **environment).stdout == f"hub:me/digits@{commit}\n"
    failed = run(LOAD.replace("digits", "other"), HF_HUB_OFFLINE="1", **environment)
    assert failed.stderr.splitlines()[-1].startswith("OSError: model: must be an available repository ")
    assert hub.requests == []


def test_importing_and_loading_do_not_import_the_client() -> None:
    program = "import sys, attnconv.models as m; m.save_to_hub; m.load('quadratic-digits'); print(sorted(sys.modules))"
    modules = run(program).stdout
    assert "attnconv.models.hub_upload" in modules
    assert "huggingface_hub" not in modules
