"""A stand-in of the Hub on loopback: as much of its HTTP API as a push and a download need, kept in memory.

The real client talks to it. `faults` makes it fail on purpose, `requests` says what it was asked.
"""

import hashlib
import json
import re
import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

TOKEN = "hf_tokenofatest"
INVALID_TOKEN = "Invalid credentials in Authorization header"


@dataclass
class Commit:
    """One commit: all files after it, and what it said."""

    files: dict[str, bytes]
    message: str = "initial commit"
    parent: str | None = None

    @property
    def sha(self) -> str:
        content = repr((sorted(self.files.items()), self.message, self.parent)).encode()
        return hashlib.sha1(content).hexdigest()


@dataclass
class Repository:
    visibility: str | None = None
    branches: dict[str, list[Commit]] = field(default_factory=lambda: {"main": [Commit({".gitattributes": b""})]})


@dataclass
class Fault:
    """An answer in place of the right one, to requests like `GET /path`."""

    pattern: str
    status: int
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)


class HubStandIn(ThreadingHTTPServer):
    """The server with all that it knows.

    Attributes:
        repositories: by id.
        objects: large files, by SHA-256.
        requests: `METHOD /path` of each request, in order.
        faults: taken from the front by requests that match.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.faults: list[Fault] = []
        self.lock = threading.Lock()

    def add(self, repo_id: str, **files: str) -> Repository:
        """A repository that is there already; names of files with `__` for the dot."""
        repository = self.repositories[repo_id] = Repository()
        content = {name.replace("__", "."): text.encode() for name, text in files.items()}
        repository.branches["main"].append(Commit(content, "by hand"))
        return repository

    def files(self, repo_id: str, branch: str = "main") -> dict[str, bytes]:
        return self.repositories[repo_id].branches[branch][-1].files

    @property
    def writes(self) -> list[str]:
        """Requests that send something."""
        return [request for request in self.requests if not request.startswith(("GET", "HEAD"))]


@contextmanager
def running_hub() -> Iterator[HubStandIn]:
    hub = HubStandIn()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubStandIn

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path, query, body = unquote(url.path), parse_qs(url.query), self._read_body()
        with self.server.lock:
            request = f"{self.command} {path}"
            self.server.requests.append(request)
            for fault in self.server.faults:
                if fault.times and re.search(fault.pattern, request):
                    fault.times -= 1
                    return self._send(fault.status, fault.body, fault.headers)
            if self.headers.get("Authorization") not in (None, f"Bearer {TOKEN}"):
                return self._send(401, {"error": "expired"}, {"X-Error-Message": INVALID_TOKEN})
            if path.startswith("/api/") and self.command == "POST" and "Authorization" not in self.headers:
                return self._send(401, {"error": "Invalid username or password."})
            for pattern, answer in _ROUTES.items():
                if match := re.fullmatch(pattern, request):
                    return answer(self, *match.groups(), body=body, query=query)
        return self._send(404, {"error": f"no such route: {request}"})

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _send(self, status: int, body: Any = None, headers: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _create(self, body: bytes, **_: Any) -> None:
        wanted = json.loads(body)
        repo_id = f"{wanted['organization']}/{wanted['name']}"
        status = 409 if repo_id in self.server.repositories else 200
        self.server.repositories.setdefault(repo_id, Repository(wanted.get("visibility")))
        self._send(status, {"url": f"{self.server.endpoint}/{repo_id}"})

    def _validate_yaml(self, body: bytes, **_: Any) -> None:
        is_valid = _metadata(json.loads(body)["content"]) is not None
        self._send(200 if is_valid else 400, {"errors": [], "warnings": []})

    def _info(self, repo_id: str, revision: str | None = None, **_: Any) -> None:
        commits = self._commits(repo_id, revision)
        if commits is not None:
            siblings = [{"rfilename": name} for name in commits[-1].files]
            info = {"id": repo_id, "sha": commits[-1].sha, "siblings": siblings}
            info["private"] = self.server.repositories[repo_id].visibility == "private"
            self._send(200, {**info, "cardData": _metadata(commits[-1].files.get("README.md", b"").decode())})

    def _commits(self, repo_id: str, revision: str | None) -> list[Commit] | None:
        repository = self.server.repositories.get(repo_id)
        commits = None if repository is None else self._branch(repository, revision)
        if commits is None:
            code = "RepoNotFound" if repository is None else "RevisionNotFound"
            self._send(404, {"error": code}, {"X-Error-Code": code})
        return commits

    def _branch(self, repository: Repository, revision: str | None) -> list[Commit] | None:
        for name, commits in repository.branches.items():
            if (revision or "main") in (name, commits[-1].sha):
                return commits
        return None

    def _create_branch(self, repo_id: str, branch: str, **_: Any) -> None:
        branches = self.server.repositories[repo_id].branches
        status = 409 if branch in branches else 200
        branches.setdefault(branch, [*branches["main"]])
        self._send(status)

    def _preupload(self, repo_id: str, revision: str, body: bytes, **_: Any) -> None:
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        self._send(200, {"files": modes})

    def _lfs_batch(self, repo_id: str, body: bytes, **_: Any) -> None:
        objects: list[dict[str, Any]] = json.loads(body)["objects"]
        for wanted in objects:
            if wanted["oid"] not in self.server.objects:
                wanted["actions"] = {"upload": {"href": f"{self.server.endpoint}/lfs/{wanted['oid']}"}}
        self._send(200, {"transfer": "basic", "objects": objects})

    def _lfs_upload(self, oid: str, body: bytes, **_: Any) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.server.objects[oid] = body
        self._send(200)

    def _commit(self, repo_id: str, revision: str, body: bytes, query: dict[str, Any], **_: Any) -> None:
        header, *operations = [json.loads(line) for line in body.splitlines()]
        commits = self._commits(repo_id, revision)
        if commits is None:
            return
        if header["value"].get("parentCommit") not in (None, commits[-1].sha):
            self._send(412, {"error": "the branch has moved"})
            return
        files = dict(commits[-1].files)
        for operation in operations:
            key, value = operation["key"], operation["value"]
            if key == "deletedFile":
                del files[value["path"]]
            else:
                is_large = key == "lfsFile"
                files[value["path"]] = self.server.objects[value["oid"]] if is_large else b64decode(value["content"])
        commit = Commit(files, header["value"]["summary"], commits[-1].sha)
        answer = {"commitOid": commit.sha, "commitUrl": f"{self.server.endpoint}/{repo_id}/commit/{commit.sha}"}
        if "create_pr" in query:
            self.server.repositories[repo_id].branches["refs/pr/1"] = [*commits, commit]
            answer["pullRequestUrl"] = f"{self.server.endpoint}/{repo_id}/discussions/1"
        else:
            commits.append(commit)
        self._send(200, answer)

    def _resolve(self, repo_id: str, revision: str, name: str, **_: Any) -> None:
        commits = self._commits(repo_id, revision)
        if commits is None:
            return
        if name not in commits[-1].files:
            self._send(404, {"error": "EntryNotFound"}, {"X-Error-Code": "EntryNotFound"})
            return
        content = commits[-1].files[name]
        etag = hashlib.sha256(content).hexdigest()
        self._send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": commits[-1].sha})


def _metadata(card: str) -> dict[str, Any] | None:
    return yaml.safe_load(card.split("---\n")[1]) if card.startswith("---\n") else None


_ROUTES = {
    r"POST /api/repos/create": _Handler._create,
    r"POST /api/validate-yaml": _Handler._validate_yaml,
    r"GET /api/models/([^/]+/[^/]+)": _Handler._info,
    r"GET /api/models/([^/]+/[^/]+)/revision/(.+)": _Handler._info,
    r"POST /api/models/([^/]+/[^/]+)/branch/(.+)": _Handler._create_branch,
    r"POST /api/models/([^/]+/[^/]+)/preupload/(.+)": _Handler._preupload,
    r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch": _Handler._lfs_batch,
    r"PUT /lfs/([0-9a-f]{64})": _Handler._lfs_upload,
    r"POST /api/models/([^/]+/[^/]+)/commit/(.+)": _Handler._commit,
    r"(?:GET|HEAD) /([^/]+/[^/]+)/resolve/([^/]+)/(.+)": _Handler._resolve,
}
