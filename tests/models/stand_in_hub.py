"""Stand-in for the Hugging Face hub on 127.0.0.1, with the part of its protocol that huggingface_hub uses here.

Files whose names end in .safetensors are uploaded as LFS objects to `/lfs/SHA256`; all other files are part of the
commit. Not covered: Xet, the redirection of downloads to a content delivery network, uploads in several parts, access
rights other than the token, pull requests, and the hub's validation of metadata.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

Files = dict[str, str]  # etag of each file


@dataclass
class Hub:
    """Repositories of the stand-in, and the requests that it has received."""

    endpoint: str = ""
    commits: dict[str, dict[str, Files]] = field(default_factory=dict)  # repository, commit, files
    branches: dict[str, dict[str, str]] = field(default_factory=dict)  # repository, branch, commit
    contents: dict[str, bytes] = field(default_factory=dict)  # by etag
    requests: list[str] = field(default_factory=list)  # method, path, range
    private: list[str] = field(default_factory=list)
    drop_after: int | None = None  # bytes after which the next download breaks off

    def create(self, repo: str) -> None:
        self.commits[repo] = {"0" * 40: {}}
        self.branches[repo] = {"main": "0" * 40}

    def commit(self, repo: str, branch: str, files: Files) -> str:
        """Add a commit; return its identifier. A file without etag is deleted."""
        all_files = {**self.commits[repo][self.branches[repo][branch]], **files}
        all_files = {path: etag for path, etag in all_files.items() if etag}
        commit = hashlib.sha1(json.dumps([len(self.commits[repo]), all_files]).encode()).hexdigest()
        self.commits[repo][commit] = all_files
        self.branches[repo][branch] = commit
        return commit

    def store(self, content: bytes, *, large: bool) -> str:
        """Store a file's content; return its etag."""
        blob = b"blob %d\0" % len(content) + content
        etag = hashlib.sha256(content).hexdigest() if large else hashlib.sha1(blob).hexdigest()
        self.contents[etag] = content
        return etag

    def downloads(self) -> list[str]:
        return [line for line in self.requests if line.startswith("GET ") and "/resolve/" in line]


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: object) -> None: ...

    def parts(self) -> list[str]:
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        return [unquote(part) for part in path.strip("/").split("/")]

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def reply(self, values: Any = None, *, status: int = 200, content: bytes = b"", **headers: str) -> None:
        content = content if values is None else json.dumps(values).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET" and self.hub.drop_after is not None:
            content, self.hub.drop_after = content[: self.hub.drop_after], None
        if self.command != "HEAD":
            self.wfile.write(content)

    def missing(self, what: str, status: int = 404) -> None:
        self.reply({"error": f"{what} not found"}, status=status, X_Error_Code=f"{what}NotFound")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        match self.parts():
            case [owner, name, "resolve", revision, path] if found := self.resolved(f"{owner}/{name}", revision):
                self.send_file(found[1].get(path), found[0])
            case ["api", "models", owner, name, "revision", revision] if found := self.resolved(
                f"{owner}/{name}", revision
            ):
                siblings = [{"rfilename": path} for path in found[1]]
                self.reply({"id": f"{owner}/{name}", "sha": found[0], "siblings": siblings, "tags": []})
            case ["api", *_]:
                self.missing("Entry")

    def resolved(self, repo: str, revision: str) -> tuple[str, Files] | None:
        """Return the commit and the files of a revision, or reply that there is none."""
        commits = self.hub.commits.get(repo, {})
        commit = self.hub.branches.get(repo, {}).get(revision, revision)
        if commit not in commits:
            self.missing("Revision" if commits else "Repo")
            return None
        return commit, commits[commit]

    def send_file(self, etag: str | None, commit: str) -> None:
        if etag is None:
            self.missing("Entry")
            return
        content = self.hub.contents[etag]
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        headers = {"X_Repo_Commit": commit, "ETag": f'"{etag}"'}
        if start:
            headers["Content_Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.reply(status=206 if start else 200, content=content[start:], **headers)

    def do_PUT(self) -> None:
        etag = self.parts()[1]
        assert self.hub.store(self.body(), large=True) == etag
        self.reply({})

    def do_POST(self) -> None:
        parts, body = self.parts(), self.body()
        if self.headers.get("Authorization") != "Bearer stand-in" and parts != ["api", "validate-yaml"]:
            self.missing("Repo", status=401)
            return
        match parts:
            case ["api", "validate-yaml"]:
                self.reply({"errors": [], "warnings": []})
            case ["api", "repos", "create"]:
                self.create(json.loads(body))
            case ["api", "models", owner, name, "branch", branch]:
                branches = self.hub.branches[f"{owner}/{name}"]
                self.reply({}, status=409 if branch in branches else 200)
                branches.setdefault(branch, branches["main"])
            case ["api", "models", owner, name, "preupload", revision]:
                self.choose_modes(f"{owner}/{name}", revision, json.loads(body)["files"])
            case [_, _, "info", "lfs", "objects", "batch"]:
                objects = json.loads(body)["objects"]
                for entry in objects:
                    if entry["oid"] not in self.hub.contents:
                        entry["actions"] = {"upload": {"href": f"{self.hub.endpoint}/lfs/{entry['oid']}"}}
                self.reply({"transfer": "basic", "objects": objects})
            case ["api", "models", owner, name, "commit", branch]:
                self.commit(f"{owner}/{name}", branch, [json.loads(line) for line in body.splitlines()])

    def create(self, values: dict[str, Any]) -> None:
        repo = f"{values['organization']}/{values['name']}"
        exists = repo in self.hub.commits
        if not exists:
            self.hub.create(repo)
            if values.get("private") or values.get("visibility") == "private":
                self.hub.private.append(repo)
        self.reply({"url": f"{self.hub.endpoint}/{repo}"}, status=409 if exists else 200)

    def choose_modes(self, repo: str, revision: str, files: list[dict[str, Any]]) -> None:
        """Reply how to upload each file, with the etag of the existing file at its path."""
        if found := self.resolved(repo, revision):
            for file in files:
                mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
                file |= {"uploadMode": mode, "shouldIgnore": False, "oid": found[1].get(file["path"])}
            self.reply({"files": files})

    def commit(self, repo: str, branch: str, lines: list[dict[str, Any]]) -> None:
        kinds = ("lfsFile", "file", "deletedFile")
        values = {kind: [line["value"] for line in lines if line["key"] == kind] for kind in kinds}
        files = {value["path"]: value["oid"] for value in values["lfsFile"]}
        files |= {value["path"]: "" for value in values["deletedFile"]}
        for value in values["file"]:
            files[value["path"]] = self.hub.store(base64.b64decode(value["content"]), large=False)
        commit = self.hub.commit(repo, branch, files)
        self.reply({"commitUrl": f"{self.hub.endpoint}/{repo}/commit/{commit}", "commitOid": commit})


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
