"""Upload of runs and checkpoints to the Hugging Face hub."""

from pathlib import Path

from attnconv.models.hub_download import LIBRARY, WEIGHTS, check_repository, hub
from attnconv.models.model_card import model_card
from attnconv.models.model_loader import checkpoint_file

RECORDS = ("settings.json", "result.json", "metrics.jsonl", "heads.jsonl")


def save_to_hub(
    path: str | Path, repo: str, *, private: bool = False, revision: str | None = None, licence: str = "mit"
) -> str:
    """Upload the weights and the records of a run to the Hugging Face hub, with a model card, in one commit.

    The weights are those that `load` returns for the same path. The records are `settings.json`, `result.json`,
    `metrics.jsonl` and `heads.jsonl`, as far as they exist, and replace those of earlier weights; `settings.json`
    contains the run's command, its paths and the name of the processor. The card (`README.md`) lists the accuracy and
    the settings that these files record, with known limitations, and replaces an existing card. Log in first with
    `hf auth login`, or set HF_TOKEN.

    Args:
        path: Run folder, folder with `weights.safetensors`, or checkpoint.
        repo: OWNER/NAME of the repository, which is created if it does not exist.
        private: Create a private repository; without effect if the repository exists.
        revision: Branch, which is created if it does not exist. The default is the main branch.
        licence: Licence of the weights, as an identifier of the hub, such as "mit" or "cc-by-4.0".

    Returns:
        `hub:OWNER/NAME@COMMIT`, with which `load` returns the uploaded model.

    Raises:
        ValueError: If `repo` is not OWNER/NAME, or `load` rejects the weights.
        FileNotFoundError: If there are no weights at `path`.
        OSError: If the hub cannot be reached, or rejects the upload.
        ImportError: If huggingface_hub is not installed.
    """
    check_repository("repo", repo, repo)
    folder, weights = Path(path), checkpoint_file(Path(path))
    files: dict[str, Path | bytes] = {WEIGHTS: weights}
    files |= {name: folder / name for name in RECORDS if (folder / name).is_file()}
    files["README.md"] = model_card(repo, folder, weights, licence).encode()
    with hub("repo", "must be a repository to which you can write", repo) as client:
        api = client.HfApi(**LIBRARY)
        api.create_repo(repo, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        before = {file.rfilename for file in api.model_info(repo, revision=revision or "main").siblings or ()}
        old = before.intersection(RECORDS).difference(files)  # records of the earlier weights
        operations = [client.CommitOperationDelete(name) for name in sorted(old)]
        operations += [client.CommitOperationAdd(name, content) for name, content in files.items()]
        message = f"Upload a model of attnconv {LIBRARY['library_version']}"
        commit = api.create_commit(repo, operations, commit_message=message, revision=revision)
    return f"hub:{repo}@{commit.oid}"
