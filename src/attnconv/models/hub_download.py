"""Download of weights from the Hugging Face hub with the package huggingface_hub, which also caches and resumes them.

The hub identifies the content of a file by its etag: the SHA-256 of a large file, or the SHA-1 of a small file's git
blob. The cache stores a file under its etag and the commit's folder links to it, so that the content can be verified,
also offline. On systems without symbolic links the cache does not store the etag, and nothing is compared.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attnconv
from attnconv._util.errors import bad
from attnconv._util.exports import missing

WEIGHTS = "weights.safetensors"
"""Name of the weights file in a repository."""
LIBRARY = {"library_name": "attnconv", "library_version": attnconv.__version__}


def download(name: str) -> tuple[Path, str]:
    """Download the weights of OWNER/NAME or OWNER/NAME@REVISION; return the file and `hub:OWNER/NAME@COMMIT`."""
    repo, at, revision = name.partition("@")
    check_repository("model", repo, f"hub:{name}")
    with hub("model", f"must be an available repository with {WEIGHTS}", f"hub:{name}") as client:
        path = Path(client.hf_hub_download(repo, WEIGHTS, revision=revision if at else None, **LIBRARY))
    _verify(path)
    return path, f"hub:{repo}@{path.parent.name}"


def check_repository(argument: str, repo: str, got: str) -> None:
    """Require OWNER/NAME; the client checks the characters."""
    if not all(repo.partition("/")) or repo.count("/") > 1:
        raise ValueError(bad(argument, "must contain OWNER/NAME of a repository on the Hugging Face hub", got))


@contextmanager
def hub(argument: str, requirement: str, got: str) -> Iterator[Any]:
    """Import huggingface_hub, and convert its errors, whose base classes depend on its version, to `OSError`."""
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise (missing(error) or error) from error
    try:
        yield huggingface_hub
    except Exception as error:
        reason = " ".join(str(error).split("\n\n")[-1].split()) or type(error).__name__
        raise OSError(bad(argument, requirement, got, f"Error from huggingface_hub: {reason}")) from error


def _verify(path: Path) -> None:
    etag = path.readlink().name if path.is_symlink() else ""
    content = path.read_bytes()
    if len(etag) == 64:
        found = hashlib.sha256(content).hexdigest()
    elif len(etag) == 40:
        found = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    else:
        return
    if found != etag:
        fix = f"Delete {path.resolve()} and load the model again."
        raise ValueError(bad("checkpoint", f"must have the hub's checksum {etag}", found, fix, origin=str(path)))
