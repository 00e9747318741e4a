"""A small Hugging Face hub for tests. It speaks the protocol that `huggingface_hub` uses to read models: info, tree and
resolve routes, ETags, redirects of large files, range requests, commits, private and gated repositories; and to write
them: new repositories and branches, the choice of how a file travels, git-lfs batches, and commits."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from helpers.patience import PATIENCE

_INFO = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>[^/]+))?")
_TREE = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)(/.*)?")
_RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)")
_CREATE = re.compile(r"/api/repos/create")
_BRANCH = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<revision>.+)")
_PREUPLOAD = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>.+)")
_COMMIT = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>.+)")
_LFS = re.compile(r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch")
_LARGE = (".safetensors", ".bin", ".pth")


@dataclass
class Repository:
    """`commits`: the files of each commit. `readers`: tokens that may see it; None: everybody. `gated`: only these
    tokens may download files, though everybody sees the page. `private`: as it was asked for when it was made."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    readers: set[str] | None = None
    gated: set[str] | None = None
    private: bool = False

    def push(self, files: dict[str, bytes], branch: str = "main") -> str:
        """The new commit."""
        content = sorted((name, hashlib.sha256(data).hexdigest()) for name, data in files.items())
        commit = hashlib.sha1(repr((content, len(self.commits))).encode()).hexdigest()
        self.commits[commit] = files
        self.branches[branch] = commit
        return commit


def folder_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class FakeHub:
    """`asked`: method, path, token and range of each request. `cut`: so many answers with a large file's content end
    after half of it. `status`: so many next answers have this status instead. `hold`: large files wait for it.
    `writers`: tokens that may write."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.repositories: dict[str, Repository] = {}
        self.tokens: set[str] = set()
        self.writers: set[str] = set()
        self.lfs: dict[str, bytes] = {}
        self.asked: list[tuple[str, str, str, str]] = []
        self.cut = 0
        self.status: list[int] = []
        self.hold = threading.Event()
        self.hold.set()
        # Large files come from another server, as a hub's come from a network for content.
        self.servers = [ThreadingHTTPServer((host, 0), self._handler()) for _ in range(2)]
        for server in self.servers:
            server.daemon_threads = True

    @property
    def url(self) -> str:
        return self._address(0)

    def _address(self, number: int) -> str:
        host, port = self.servers[number].server_address[:2]
        return f"http://{host!s}:{port}"

    def repository(self, name: str) -> Repository:
        return self.repositories.setdefault(name, Repository())

    def downloads(self) -> list[str]:
        """Names of the files whose content was asked for."""
        return [p.rsplit("/", 1)[1] for m, p, _, _ in self.asked if m == "GET" and ("/resolve/" in p or "/large/" in p)]

    @contextmanager
    def running(self) -> Iterator[FakeHub]:
        every = {"poll_interval": 0.05}
        threads = [threading.Thread(target=server.serve_forever, kwargs=every) for server in self.servers]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self.hold.set()
            for server, thread in zip(self.servers, threads, strict=True):
                server.shutdown()
                server.server_close()
                thread.join()

    def _handler(hub) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - `self` is the handler's
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer()

            def do_GET(self) -> None:
                self.answer()

            def do_POST(self) -> None:
                self.write()

            def do_PUT(self) -> None:
                self.write()

            def body(self) -> bytes:
                if self.headers.get("Transfer-Encoding", "") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)

            def write(self) -> None:
                path, data = unquote(urlsplit(self.path).path), self.body()
                self.token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                hub.asked.append((self.command, path, self.token, ""))
                if hub.status:
                    self.send(hub.status.pop(0))
                elif path.startswith("/lfs/"):  # its address is the permission
                    hub.lfs[path.removeprefix("/lfs/")] = data
                    assert hashlib.sha256(data).hexdigest() == path.removeprefix("/lfs/")
                    self.send(200)
                elif path == "/api/validate-yaml":
                    document = json.loads(data)
                    good = document["repoType"] == "model" and document["content"].startswith("---\n")
                    self.json({"errors": [] if good else [{"message": "no metadata"}], "warnings": []})
                elif self.token not in hub.tokens:
                    self.send(401, {"X-Error-Message": "Invalid username or password."})
                elif self.token not in hub.writers:
                    self.send(403, {"X-Error-Message": "Forbidden: you have no write access"})
                elif _CREATE.fullmatch(path):
                    self.create(json.loads(data))
                elif match := _BRANCH.fullmatch(path):
                    self.branch(match)
                elif match := _PREUPLOAD.fullmatch(path):
                    files = [
                        {
                            "path": file["path"],
                            "uploadMode": "lfs" if file["path"].endswith(_LARGE) else "regular",
                            "shouldIgnore": False,
                        }
                        for file in json.loads(data)["files"]
                    ]
                    self.json({"files": files})
                elif _LFS.fullmatch(path):
                    objects = [self.upload(each) for each in json.loads(data)["objects"]]
                    self.json({"transfer": "basic", "objects": objects})
                elif match := _COMMIT.fullmatch(path):
                    self.commit(match, [json.loads(line) for line in data.splitlines()])
                else:
                    self.send(404)

            def create(self, asked: dict[str, Any]) -> None:
                name = f"{asked['organization']}/{asked['name']}"
                known = name in hub.repositories
                if not known:
                    made = hub.repository(name)
                    made.push({".gitattributes": b"*.safetensors filter=lfs"})
                    made.private = asked.get("visibility") == "private"
                self.json({"url": f"{hub.url}/{name}", "id": name}, 409 if known else 200)

            def branch(self, match: re.Match[str]) -> None:
                branches, name = hub.repositories[match["repo"]].branches, match["revision"]
                known = name in branches
                branches.setdefault(name, branches["main"])
                self.json({"error": "Reference already exists"} if known else {}, 409 if known else 200)

            def upload(self, asked: dict[str, Any]) -> dict[str, Any]:
                href = f"{hub._address(1)}/lfs/{asked['oid']}"
                there = asked["oid"] in hub.lfs
                return asked | ({} if there else {"actions": {"upload": {"href": href}}})

            def commit(self, match: re.Match[str], lines: list[dict[str, Any]]) -> None:
                repository, branch = hub.repositories[match["repo"]], match["revision"]
                files = dict(repository.commits[repository.branches[branch]])
                for line in lines:
                    value = line["value"]
                    if line["key"] == "file":
                        files[value["path"]] = base64.b64decode(value["content"])
                    elif line["key"] == "lfsFile":
                        files[value["path"]] = hub.lfs[value["oid"]]
                commit = repository.push(files, branch)
                self.json(
                    {"success": True, "commitOid": commit, "commitUrl": f"{hub.url}/{match['repo']}/commit/{commit}"}
                )

            def answer(self) -> None:
                path = unquote(urlsplit(self.path).path)
                self.token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                hub.asked.append((self.command, path, self.token, self.headers.get("Range", "")))
                if hub.status:
                    self.send(hub.status.pop(0))
                elif path.startswith("/large/"):
                    self.large(path)
                elif self.token and self.token not in hub.tokens:
                    self.send(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
                elif match := _TREE.fullmatch(path):
                    self.tree(match)
                elif match := _INFO.fullmatch(path):
                    self.info(match)
                elif match := _RESOLVE.fullmatch(path):
                    self.resolve(match)
                else:
                    self.send(404)

            def find(self, match: re.Match[str]) -> tuple[Repository, str] | None:
                found = hub.repositories.get(match["repo"])
                if found is None or (found.readers is not None and self.token not in found.readers):
                    self.send(404 if self.token else 401, {"X-Error-Code": "RepoNotFound"})
                    return None
                revision = match["revision"] or "main"
                commit = found.branches.get(revision, revision)
                if commit not in found.commits:
                    self.send(404, {"X-Error-Code": "RevisionNotFound"})
                    return None
                return found, commit

            def entries(self, files: dict[str, bytes]) -> Iterator[dict[str, Any]]:
                for name, data in files.items():
                    about: dict[str, Any] = {"oid": hashlib.sha1(data).hexdigest(), "size": len(data)}
                    if name.endswith(_LARGE):
                        sha = hashlib.sha256(data).hexdigest()
                        about["lfs"] = {"oid": sha, "sha256": sha, "size": len(data), "pointerSize": 134}
                    yield {"name": name, **about}

            def info(self, match: re.Match[str]) -> None:
                if (found := self.find(match)) is None:
                    return
                repository, commit = found
                siblings = [
                    {"rfilename": e["name"], "size": e["size"], "blobId": e["oid"]}
                    | ({"lfs": e["lfs"]} if "lfs" in e else {})
                    for e in self.entries(repository.commits[commit])
                ]
                gated = "auto" if repository.gated is not None else False
                self.json(
                    {
                        "id": match["repo"],
                        "sha": commit,
                        "siblings": siblings,
                        "private": repository.private,
                        "gated": gated,
                    }
                )

            def tree(self, match: re.Match[str]) -> None:
                if (found := self.find(match)) is None:
                    return
                repository, commit = found
                listed = self.entries(repository.commits[commit])
                self.json([{"type": "file", "path": e.pop("name"), **e} for e in listed])

            def resolve(self, match: re.Match[str]) -> None:
                if (found := self.find(match)) is None:
                    return
                repository, commit = found
                if repository.gated is not None and self.token not in repository.gated:
                    self.send(403 if self.token else 401, {"X-Error-Code": "GatedRepo"})
                    return
                data = repository.commits[commit].get(match["name"])
                if data is None:
                    self.send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
                    return
                head = {"X-Repo-Commit": commit}
                if match["name"].endswith(_LARGE):
                    sha = hashlib.sha256(data).hexdigest()
                    location = f"{hub._address(1)}/large/{match['repo']}/{commit}/{match['name']}"
                    linked = {"X-Linked-ETag": f'"{sha}"', "X-Linked-Size": str(len(data))}
                    self.send(302, head | linked | {"Location": location})
                else:
                    self.content(data, head | {"ETag": f'"{hashlib.sha1(data).hexdigest()}"'})

            def large(self, path: str) -> None:
                _, _, owner, name, commit, file = path.split("/", 5)
                data = hub.repositories[f"{owner}/{name}"].commits[commit][file]
                hub.hold.wait(PATIENCE)
                self.content(data, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"'}, cuttable=self.command == "GET")

            def content(self, data: bytes, headers: dict[str, str], cuttable: bool = False) -> None:
                status, part = 200, data
                if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                    first, last = int(asked[1]), int(asked[2] or len(data) - 1)
                    status, part = 206, data[first : last + 1]
                    headers |= {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
                self.head(status, headers | {"Accept-Ranges": "bytes"}, len(part))
                if self.command == "GET":
                    cut = cuttable and hub.cut > 0
                    hub.cut -= cut
                    self.wfile.write(part[: len(part) // 2] if cut else part)
                    self.close_connection = self.close_connection or cut

            def json(self, document: Any, status: int = 200) -> None:
                data = json.dumps(document).encode()
                self.head(status, {"Content-Type": "application/json"}, len(data))
                if self.command != "HEAD":
                    self.wfile.write(data)

            def send(self, status: int, headers: dict[str, str] | None = None) -> None:
                self.head(status, headers or {}, 0)

            def head(self, status: int, headers: dict[str, str], length: int) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(length))
                self.end_headers()

        return Handler
