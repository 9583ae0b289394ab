"""A small Hugging Face Hub on loopback, and the layout of its cache on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import set_client_factory

from dynamo.llm import model_download

_LARGE = 1_000_000
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves one model, ``name``, with ``files``. ``status`` replaces every answer.

    While ``gate`` is not set, the download of a large file stops after its first half. ``etags``
    replaces those of files, ``commit`` that of the repository.
    """

    def __init__(self, name: str, files: Mapping[str, bytes], status: int = 200) -> None:
        self.name, self.files, self.status = name, dict(files), status
        self.requests: list[str] = []
        self.tokens: set[str | None] = set()
        self.etags: dict[str, str] = {}
        self.commit = COMMIT
        self.gate = threading.Event()
        self.gate.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def downloaded(self) -> set[str]:
        """The files that were fetched."""
        mark = "/resolve/"
        found = (one.partition(" ") for one in self.requests)
        return {
            path.partition(mark)[2].partition("/")[2]
            for method, _, path in found
            if method == "GET" and mark in path
        }

    def close(self) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def reply(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        """Return status, body and headers."""
        if self.status != 200:
            code = {401: "GatedRepo", 404: "RepoNotFound"}.get(self.status, "Error")
            return self.status, b"{}", {"X-Error-Code": code}
        if path == "/api/models":
            hit = {
                "id": self.name,
                "downloads": 1234,
                "likes": 5,
                "pipeline_tag": "text-generation",
            }
            return 200, _json([hit]), {}
        api = f"/api/models/{self.name}"
        if path.startswith((f"{api}/revision/", api)) and "/tree/" not in path:
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self._sorted()]
            return 200, _json({"id": self.name, "sha": self.commit, "siblings": siblings}), {}
        if path.startswith(f"{api}/tree/"):
            rows = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in self._sorted()
            ]
            return 200, _json(rows), {}
        name = path.partition("/resolve/")[2].partition("/")[2]
        if not path.startswith(f"/{self.name}/resolve/") or name not in self.files:
            code = "EntryNotFound" if path.startswith(f"/{self.name}/") else "RepoNotFound"
            return 404, b"{}", {"X-Error-Code": code, "X-Repo-Commit": COMMIT}
        data = self.files[name]
        etag = self.etags.get(name, _etag(data))
        return 200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": self.commit}

    def _sorted(self) -> list[tuple[str, bytes]]:
        return sorted(self.files.items())

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                path = self.path.partition("?")[0]
                hub.requests.append(f"{self.command} {path}")
                hub.tokens.add(self.headers.get("authorization"))
                status, body, headers = hub.reply(path)
                self.send_response(status)
                for key, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "GET":
                    half = len(body) // 2 if len(body) > _LARGE else len(body)
                    with contextlib.suppress(ConnectionError):
                        self.wfile.write(body[:half])
                        self.wfile.flush()
                        if half < len(body):
                            hub.gate.wait(60)
                        self.wfile.write(body[half:])

            do_GET = do_HEAD = answer

            def log_message(self, format: str, *args: Any) -> None:
                """Keep the test's output clean."""

        return Handler


def cache_model(home: Path, name: str, files: Mapping[str, bytes]) -> Path:
    """Write ``files`` as the Hub's client caches them under HF_HOME; return the snapshot."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for file, data in files.items():
        blob = repository / "blobs" / _etag(data)
        blob.write_bytes(data)
        (snapshot / file).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def run_with_hub(code: str, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python ``code`` in a process whose Hugging Face home is ``home``."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def _etag(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _json(document: Any) -> bytes:
    return json.dumps(document).encode()


class Body(httpx2.SyncByteStream):
    """Bytes as they come from a socket; ``size_bytes`` were read."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self._parts = parts
        self.size_bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        for part in self._parts:
            self.size_bytes += len(part)
            yield part


@contextlib.contextmanager
def answering(answer: Callable[[str], tuple[Body | str, dict[str, str]]]) -> Iterator[None]:
    """Let the Hub's library get the ``answer`` about models, without a server: body and headers."""

    def handle(request: httpx2.Request) -> httpx2.Response:
        if "/api/models" not in request.url.path:  # the library asks for more, as which agents are
            return httpx2.Response(404)
        body, headers = answer(str(request.url))
        stream = Body([body.encode()]) if isinstance(body, str) else body
        return httpx2.Response(200, headers=headers, stream=stream)

    def client() -> httpx2.Client:
        made = httpx2.Client(transport=httpx2.MockTransport(handle))
        model_download.bounded(made)
        return made

    set_client_factory(client)
    try:
        yield
    finally:
        set_client_factory(model_download.bounded_client)
