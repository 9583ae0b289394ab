"""An OpenAI-compatible server of another make, as a process: ``python openai_server.py PORT``.

The body of a request says what it does: ``words`` of text, ``pause_s`` before each, ``status``,
``break_after`` words; those of the user ``held`` wait for ``GET /release``. ``GET /seen`` reports
what it has received.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

MODEL = "org/remote-model"
POSTS = (
    *("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/chat/completions"),
    *("/v1/completions", "/v1/embeddings", "/v1/responses/{response_id}/cancel"),
)
PATHS: dict[str, Any] = {path: {"post": {}} for path in POSTS}
PATHS["/v1/responses/{response_id}"] = {"get": {}, "delete": {}}
USAGE = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[dict[str, Any]] = {
        "bodies": [],
        "headers": [],
        "paths": [],
        "aborted": 0,
        "sent_bytes": 0,
    }
    lock = threading.Lock()
    released = threading.Event()

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/release":
            self.released.set()
        pages = {
            "/v1/models": {"object": "list", "data": [{"id": MODEL, "owned_by": "someone"}]},
            "/health": {},
            "/seen": self.seen,
            "/release": {},
            "/openapi.json": {"paths": PATHS},
        }
        if self.path.startswith("/v1/responses/"):
            return self.stored(status="completed")
        page = pages.get(self.path)
        return self.answer(404 if page is None else 200, page or {})

    def do_DELETE(self) -> None:
        self.stored(deleted=True)

    def stored(self, **more: Any) -> None:
        """Answer about a response that the server has stored."""
        with self.lock:
            self.seen["paths"].append(f"{self.command} {self.path}")
        output: list[Any] = []
        self.answer(200, {"id": "resp_1", "object": "response", "output": output, **more})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.headers.get("content-type", "").startswith("multipart/"):
            with self.lock:
                self.seen["bodies"].append(raw.decode("latin-1"))
            return self.answer(200, {"text": f"{len(raw)} bytes"})
        if self.path.startswith("/v1/responses/"):
            return self.stored(status="cancelled")
        body = json.loads(raw)
        with self.lock:
            self.seen["bodies"].append(body)
            self.seen["headers"].append(dict(self.headers))
        if body.get("status"):
            error = {"message": "upstream says no", "type": "odd", "param": None, "code": "x7"}
            return self.answer(body["status"], {"error": error}, **{"retry-after": "3"})
        if self.path == "/v1/embeddings":
            row = {"object": "embedding", "index": 0, "embedding": [0.25, -1.0]}
            return self.answer(200, {"object": "list", "data": [row], "model": MODEL})
        if body.get("stream"):
            return self.stream(body)
        time.sleep(body.get("pause_s", 0))
        if body.get("user") == "held":
            self.released.wait(60)
        message = {"role": "assistant", "content": "w0 w1 w2", "odd_field": [1, 2]}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "stop_reason": 7}
        return self.answer(200, self.envelope("chat.completion", [choice], usage=USAGE))

    def envelope(self, kind: str, choices: list[Any], **more: Any) -> dict[str, Any]:
        fixed = {"id": "u1", "object": kind, "created": 1, "model": MODEL}
        return {**fixed, "system_fingerprint": sys.argv[1], "choices": choices, **more}

    def stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            for number in range(body.get("words", 3)):
                time.sleep(body.get("pause_s", 0))
                text = f"w{number} " + "x" * body.get("size", 0)
                choice = {"index": 0, "delta": {"content": text}, "odd_field": number}
                self.send(self.envelope("chat.completion.chunk", [choice]))
            self.send(self.envelope("chat.completion.chunk", [], usage=USAGE))
            self.chunk(b"data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            with self.lock:
                self.seen["aborted"] += 1
            self.close_connection = True

    def send(self, value: Any) -> None:
        self.chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        with self.lock:
            self.seen["sent_bytes"] += len(data)

    def answer(self, status: int, body: Any, **headers: str) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"content-type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    """Threads that do not keep the process alive."""

    daemon_threads = True
    request_queue_size = 128


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
