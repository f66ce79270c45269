"""A real HTTP server on the loopback address that speaks the Hugging Face Hub's protocol, in memory.

It serves the unmodified `huggingface_hub` client (without Xet, which has a storage protocol of its own): accounts,
repositories, pre-upload, LFS upload, commits, branches, pull requests, listings, files and collections.
"""

import base64
import fnmatch
import hashlib
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

USERS = {"hf_loopback_write": "user", "hf_loopback_read": "user"}  # the second token may not write
LFS_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.zip")
_INITIAL = "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in LFS_PATTERNS).encode()
_DATE = "2026-01-01T00:00:00.000Z"


class Blob(NamedTuple):
    """A file's content; `is_lfs` says where the Hub keeps it."""

    content: bytes
    is_lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def git_oid(self) -> str:
        content = f"version lfs\noid sha256:{self.sha256}\n".encode() if self.is_lfs else self.content
        return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()

    @property
    def checksum(self) -> str:
        return self.sha256 if self.is_lfs else self.git_oid

    def entry(self, path: str) -> dict[str, Any]:
        """How a listing shows it."""
        facts = {"type": "file", "path": path, "size": len(self.content), "oid": self.git_oid}
        lfs = {"lfs": {"oid": self.sha256, "size": len(self.content), "pointerSize": 130}}
        return facts | lfs if self.is_lfs else facts


class Repository:
    """Commits are whole trees; branches, pull requests and commits are all found by name in `refs`."""

    def __init__(self, is_private: bool):
        self.is_private = is_private
        self.refs: dict[str, str] = {}
        self.trees: dict[str, dict[str, Blob]] = {}
        self.messages: list[str] = []
        self.commit({".gitattributes": Blob(_INITIAL, False)}, "main", "initial commit")

    def commit(self, tree: dict[str, Blob], ref: str, message: str) -> str:
        self.messages.append(message)
        listing = json.dumps([len(self.messages), {path: blob.git_oid for path, blob in sorted(tree.items())}])
        oid = hashlib.sha1(listing.encode()).hexdigest()
        self.trees[oid], self.refs[ref] = tree, oid
        return oid

    def find(self, revision: str) -> str | None:
        """The commit that `revision` names."""
        return self.refs.get(revision) or (revision if revision in self.trees else None)

    def files(self, revision: str = "main") -> dict[str, Blob]:
        oid = self.find(revision)
        return {} if oid is None else self.trees[oid]


class Answer(NamedTuple):
    status: int
    body: Any = None
    headers: dict[str, str] = {}


class LoopbackHub:
    """Serves until the `with` block ends.

    `fault` is called with (method, path) of every request; "drop" closes the connection amid the request's body.
    """

    def __init__(self):
        self.fault: Callable[[str, str], Any] = lambda method, path: None
        self.repositories: dict[str, Repository] = {}
        self.collections: dict[str, dict[str, Any]] = {}
        self.storage: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                outer._handle(self)

            do_HEAD = do_POST = do_PUT = do_GET

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{port}"
        # Large files lie on another host, which must not see the token.
        self.storage_url = f"http://localhost:{port}/lfs"

    def __enter__(self) -> "LoopbackHub":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        url = urlsplit(request.path)
        path = unquote(url.path)
        length = int(request.headers.get("Content-Length") or 0)
        with self._lock:
            self.requests.append((request.command, path))
        if self.fault(request.command, path) == "drop":
            request.rfile.read(length // 2)
            request.close_connection = True
            return
        body = request.rfile.read(length)
        with self._lock:
            answer = self._answer(request, path, url.path, parse_qs(url.query), body)
        _send(request, answer)

    def _answer(self, request, path: str, raw_path: str, query: dict[str, list[str]], body: bytes) -> Answer:
        token = (request.headers.get("Authorization") or "").removeprefix("Bearer ")
        if path.startswith("/lfs/"):
            if token:
                return _error(400, "The token was sent to the storage")
            return self._store(path, body) if request.command == "PUT" else self._download(path, request)
        if token and token not in USERS:
            return _error(401, "Invalid credentials in Authorization header")
        user = USERS.get(token)
        method = "GET" if request.command == "HEAD" else request.command
        if method != "GET" and (user is None or token.endswith("read")):
            return _error(403 if user else 401, "You don't have the required permissions")
        for route_method, pattern, action in self._routes():
            # Slashes inside a revision or a branch arrive quoted, so routes are matched before unquoting.
            found = re.fullmatch(pattern, raw_path)
            if found and route_method == method:
                parts = {name: unquote(value or "") for name, value in found.groupdict().items()}
                return self._ask(action, parts, user, {"user": user, "query": query, "body": body})
        return _error(404, f"no such endpoint: {method} {path}")

    def _ask(self, action, parts: dict[str, str], user: str | None, arguments: dict[str, Any]) -> Answer:
        """What `action` answers, once it is clear that this account may see the repository."""
        if "repo" in parts:
            repository = self.repositories.get(parts["repo"])
            if repository is None or (repository.is_private and parts["repo"].split("/")[0] != user):
                return _error(404 if user else 401, "Repository not found", "RepoNotFound")
            arguments["repository"] = repository
            if "revision" in parts:
                parts["revision"] = parts["revision"] or "main"
                oid = repository.find(parts["revision"])
                if oid is None:
                    return _error(404, f"Invalid rev id: {parts['revision']}", "RevisionNotFound")
                arguments |= {"oid": oid, "files": repository.trees[oid]}
        return action(**parts, **arguments)

    def _routes(self):
        repository = r"(?P<repo>[^/]+/[^/]+)"
        model, revision = f"/api/models/{repository}", "(?P<revision>[^/]+)"
        return [
            ("GET", "/api/whoami-v2", self._whoami),
            ("POST", "/api/validate-yaml", self._validate_card),
            ("POST", "/api/repos/create", self._create_repository),
            ("POST", "/api/collections", self._create_collection),
            ("GET", "/api/collections/(?P<slug>.+?)", self._collection),
            ("POST", "/api/collections/(?P<slug>.+)/items", self._add_to_collection),
            ("POST", f"{model}/preupload/{revision}", self._preupload),
            ("POST", f"{model}/commit/{revision}", self._commit),
            ("POST", f"{model}/branch/(?P<branch>[^/]+)", self._create_branch),
            ("GET", f"{model}/refs", self._refs),
            ("GET", f"{model}/tree/{revision}(/(?P<path>.*))?", self._tree),
            ("GET", f"{model}(/revision/{revision})?", self._model_info),
            ("POST", rf"/{repository}\.git/info/lfs/objects/batch", self._lfs_batch),
            ("POST", f"/{repository}/lfs-verify", self._lfs_verify),
            ("GET", f"/{repository}/resolve/{revision}/(?P<path>.+)", self._resolve),
        ]

    # Accounts, repositories and collections

    def _whoami(self, user, **_) -> Answer:
        return Answer(200, {"type": "user", "name": user, "orgs": []}) if user else _error(401, "Not logged in")

    def _validate_card(self, body, **_) -> Answer:
        has_header = json.loads(body)["content"].startswith("---\n")
        return Answer(200 if has_header else 400, {"errors": [{"message": "no metadata"}], "warnings": []})

    def _create_repository(self, user, body, **_) -> Answer:
        asked = json.loads(body)
        owner = asked.get("organization") or user
        repo = f"{owner}/{asked['name']}"
        if owner != user:
            return _error(403, f"You don't have the rights to create a model under the namespace {owner!r}")
        facts = {"url": f"{self.url}/{repo}", "name": repo}
        if repo in self.repositories:
            return Answer(409, facts | {"error": "You already created this model repo"})
        # Clients before 2.0 send `private`.
        self.repositories[repo] = Repository(asked.get("visibility") == "private" or bool(asked.get("private")))
        return Answer(200, facts)

    def _create_collection(self, body, **_) -> Answer:
        asked = json.loads(body)
        slug = f"{asked['namespace']}/{asked['title'].lower().replace(' ', '-')}-{'0' * 24}"
        if slug in self.collections:
            return Answer(409, {"error": "exists", "slug": slug})
        facts = {"slug": slug, "owner": {"name": asked["namespace"]}, "items": [], "lastUpdated": _DATE, "position": 0}
        self.collections[slug] = asked | facts | {"theme": "blue", "upvotes": 0}
        return Answer(200, self.collections[slug])

    def _collection(self, slug, **_) -> Answer:
        return Answer(200, self.collections[slug])

    def _add_to_collection(self, slug, body, **_) -> Answer:
        collection, item = self.collections[slug], json.loads(body)["item"]
        if any(present["id"] == item["id"] for present in collection["items"]):
            return _error(409, "Item already in collection")
        collection["items"].append({"_id": "0", "position": len(collection["items"]), **item})
        return Answer(200, collection)

    # Uploads

    def _preupload(self, body, files, **_) -> Answer:
        found = []
        for file in json.loads(body)["files"]:
            path = file["path"]
            is_lfs = any(fnmatch.fnmatch(path, pattern) for pattern in LFS_PATTERNS) or file["size"] > 10_000_000
            facts = {"path": path, "uploadMode": "lfs" if is_lfs else "regular", "shouldIgnore": False}
            found.append(facts | {"oid": files[path].checksum if path in files else None})
        return Answer(200, {"files": found})

    def _lfs_batch(self, repo, body, **_) -> Answer:
        objects = []
        for wanted in json.loads(body)["objects"]:
            upload, verify = f"{self.storage_url}/{wanted['oid']}", f"{self.url}/{repo}/lfs-verify"
            actions = {"actions": {"upload": {"href": upload}, "verify": {"href": verify}}}
            objects.append(wanted if wanted["oid"] in self.storage else wanted | actions)
        return Answer(200, {"transfer": "basic", "objects": objects})

    def _store(self, path: str, body: bytes) -> Answer:
        sha256 = hashlib.sha256(body).hexdigest()
        if path != f"/lfs/{sha256}":
            return _error(400, "The content has another checksum")
        self.storage[sha256] = body
        return Answer(200)

    def _lfs_verify(self, body, **_) -> Answer:
        asked = json.loads(body)
        content = self.storage.get(asked["oid"])
        return Answer(200) if content is not None and len(content) == asked["size"] else _error(404, "not uploaded")

    def _commit(self, repo, repository, revision, files, query, body, **_) -> Answer:
        lines = [json.loads(line) for line in body.splitlines()]
        tree, message = dict(files), ""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                tree[value["path"]] = Blob(base64.b64decode(value["content"]), False)
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.storage:
                    return _error(400, f"The large file {value['path']} was not uploaded")
                tree[value["path"]] = Blob(self.storage[value["oid"]], True)
            elif tree.pop(value["path"], None) is None:
                return _error(404, "A file with this name doesn't exist", "EntryNotFound")
        answer = {}
        if query.get("create_pr") == ["1"]:
            number = 1 + sum(ref.startswith("refs/pr/") for ref in repository.refs)
            revision = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.url}/{repo}/discussions/{number}"
        oid = repository.commit(tree, revision, message)
        return Answer(200, answer | {"commitOid": oid, "commitUrl": f"{self.url}/{repo}/commit/{oid}"})

    def _create_branch(self, repository, branch, **_) -> Answer:
        if branch in repository.refs:
            return _error(409, f"Reference already exists: {branch}")
        repository.refs[branch] = repository.refs["main"]
        return Answer(200)

    # Reading

    def _refs(self, repository, **_) -> Answer:
        heads = {name: oid for name, oid in repository.refs.items() if not name.startswith("refs/")}
        branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": oid} for n, oid in heads.items()]
        return Answer(200, {"branches": branches, "converts": [], "tags": [], "pullRequests": []})

    def _model_info(self, repo, repository, oid, files, **_) -> Answer:
        facts = {"id": repo, "sha": oid, "private": repository.is_private, "lastModified": _DATE}
        return Answer(200, facts | {"siblings": [{"rfilename": path} for path in sorted(files)]})

    def _tree(self, files, path, query, **_) -> Answer:
        prefix = f"{path}/" if path else ""
        inside = {name: blob for name, blob in sorted(files.items()) if name.startswith(prefix)}
        if path and not inside:
            return _error(404, f"{path} does not exist", "EntryNotFound")
        folders = {name[: name.index("/", len(prefix))] for name in inside if "/" in name[len(prefix) :]}
        is_recursive = query.get("recursive") in (["true"], ["True"], ["1"])
        listed = [blob.entry(name) for name, blob in inside.items() if is_recursive or "/" not in name[len(prefix) :]]
        return Answer(200, [{"type": "directory", "path": name, "oid": "0" * 40} for name in sorted(folders)] + listed)

    def _resolve(self, path, oid, files, **_) -> Answer:
        headers = {"X-Repo-Commit": oid}
        blob = files.get(path)
        if blob is None:
            return _error(404, "Entry not found", "EntryNotFound", headers)
        if not blob.is_lfs:
            return Answer(200, blob.content, headers | {"ETag": f'"{blob.git_oid}"'})
        linked = {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.content))}
        return Answer(302, b"", headers | linked | {"Location": f"{self.storage_url}/{blob.sha256}"})

    def _download(self, path: str, request: BaseHTTPRequestHandler) -> Answer:
        content = self.storage[path.removeprefix("/lfs/")]
        headers = {"ETag": f'"{path.removeprefix("/lfs/")}"', "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range") or "")
        if not wanted:
            return Answer(200, content, headers)
        start, end = int(wanted[1]), int(wanted[2] or len(content) - 1)
        span = {"Content-Range": f"bytes {start}-{end}/{len(content)}"}
        return Answer(206, content[start : end + 1], headers | span)


def _error(status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None) -> Answer:
    facts = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    return Answer(status, {"error": message}, (headers or {}) | facts)


def _send(request: BaseHTTPRequestHandler, answer: Answer) -> None:
    is_raw = isinstance(answer.body, bytes)
    content = answer.body if is_raw else json.dumps(answer.body).encode()
    request.send_response(answer.status)
    kind = "application/octet-stream" if is_raw else "application/json; charset=utf-8"
    for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **answer.headers}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(content)
