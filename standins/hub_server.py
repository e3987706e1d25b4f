"""A stand-in of the Hugging Face hub: what `huggingface_hub` asks of it to look up a model and to download its files.

A complete small server on 127.0.0.1 in threads of its own: model info with the hashes of files, `resolve` with HEAD,
ranges and the redirect of large files, errors with the hub's codes. Files may be damaged or cut on their way.
Source: `huggingface_hub` 1.33 (`file_download.py`, `hf_api.py`, `utils/_http.py`).
"""

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(kw_only=True)
class Repository:
    """A model's files, by name; those of `large` are stored apart, as Git LFS has it.

    `damaged` files come with another last byte. `cut` files break off after half of what was asked for, and from then
    on the hub is not there for them (503), until the name is taken out.
    """

    files: dict[str, bytes]
    large: frozenset[str] = frozenset()
    is_gated: bool = False
    damaged: set[str] = field(default_factory=set[str])
    cut: set[str] = field(default_factory=set[str])
    commit: str = COMMIT

    def etag(self, name: str) -> str:
        """The hub's hash of a file: sha256 of a large one, else the id of git's blob."""
        content = self.files[name]
        if name in self.large:
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()

    def info(self, name: str) -> dict[str, object]:
        """The reply of `/api/models/…?blobs=true`."""
        siblings: list[dict[str, object]] = []
        for file, content in self.files.items():
            sibling: dict[str, object] = {"rfilename": file, "size": len(content), "blobId": "0" * 40}
            if file in self.large:
                sibling["lfs"] = {"sha256": self.etag(file), "size": len(content), "pointerSize": 134}
            else:
                sibling["blobId"] = self.etag(file)
            siblings.append(sibling)
        return {"id": name, "modelId": name, "sha": self.commit, "siblings": siblings, "private": False}


class HubServer:
    """Serves `repositories`, by ORG/NAME, from `__enter__` to `__exit__`; `asked` are its requests, in their order."""

    def __init__(self, **repositories: Repository) -> None:
        self.repositories: dict[str, Repository] = dict(repositories)
        self.asked: list[str] = []
        self._broken: set[str] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="hub")

    def __repr__(self) -> str:
        return f"<HubServer {self.url}>"

    @property
    def url(self) -> str:
        """The address, for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "HubServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def breaks(self, repository: Repository, file: str) -> bool:
        """Whether a cut file has been cut already: the hub is not there for it."""
        was_broken = file in self._broken
        self._broken.add(file)
        return was_broken and file in repository.cut


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        server_state = hub

    return Handler


class _Handler(BaseHTTPRequestHandler):
    server_state: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the base class's name
        """Says nothing on stderr."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = urlsplit(self.path).path
        self.server_state.asked.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and parts[4:] == ["revision", "main"]:
            name = "/".join(parts[2:4])
            found = self.server_state.repositories.get(name)
            if found is None:
                self._refuse(404, "RepoNotFound")
            else:
                self._send(200, {"content-type": "application/json"}, json.dumps(found.info(name)).encode())
            return
        is_store = parts[0] == "store"
        repository = self.server_state.repositories.get("/".join(parts[is_store : is_store + 2]))
        file = "/".join(parts[is_store + 4 :])
        if repository is None or parts[is_store + 2] != "resolve" or parts[is_store + 3] != repository.commit:
            self._refuse(404, "RepoNotFound")
        elif repository.is_gated:
            self._refuse(403, "GatedRepo")
        elif file not in repository.files:
            self._refuse(404, "EntryNotFound")
        elif file in repository.large and not is_store:
            headers = {"location": f"/store{path}", "x-linked-etag": f'"{repository.etag(file)}"'}
            headers |= {"x-linked-size": str(len(repository.files[file])), "x-repo-commit": repository.commit}
            # Another host, as the hub's store is: so the client keeps what these headers say.
            headers["location"] = (
                f"http://localhost:{cast('tuple[str, int]', self.server.server_address)[1]}/store{path}"
            )
            self._send(302, headers, b"", with_body=with_body)
        else:
            self._send_file(repository, file, with_body=with_body)

    def _send_file(self, repository: Repository, file: str, *, with_body: bool) -> None:
        content = repository.files[file]
        if file in repository.damaged:
            content = content[:-1] + bytes([content[-1] ^ 1])
        headers = {"etag": f'"{repository.etag(file)}"', "x-repo-commit": repository.commit}
        status, asked_range = 200, self.headers.get("range")
        if asked_range is not None:
            start = int(asked_range.removeprefix("bytes=").partition("-")[0])
            headers["content-range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            status, content = 206, content[start:]
        if with_body and file in repository.cut:
            if self.server_state.breaks(repository, file):
                self._refuse(503, "")
                return
            self.close_connection = True
            self._send(status, headers, content, cut_at=len(content) // 2)
            return
        self._send(status, headers, content, with_body=with_body)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, {"x-error-code": code} if code else {}, b"{}", with_body=self.command == "GET")

    def _send(
        self,
        status: int,
        headers: dict[str, str],
        content: bytes,
        *,
        with_body: bool = True,
        cut_at: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        if with_body:
            self.wfile.write(content[:cut_at])
