"""A small OpenAI-compatible server as a process, with the pages of one profile.

``python upstream_server.py PORT PROFILE [MODEL …]``. Tests change it by ``POST /_set`` and read
what it has seen from ``GET /_seen``.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OWNERS = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm", "llama.cpp": "llamacpp"}
OWNERS |= {"ollama": "library", "openai": "someone"}
VLLM_METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a} b"} 3.0
vllm:num_requests_running{engine="1",model_name="a} b"} 4.0
vllm:num_requests_waiting{engine="0",model_name="a} b"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="a} b"} 0.25
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="200"} 1.0
"""
SGLANG_METRICS = """sglang:num_running_reqs{model_name="m",tp_rank="0"} 5.0
sglang:num_running_reqs{model_name="m",tp_rank="1"} 5.0
sglang:num_queue_reqs{model_name="m"} 2.0
sglang:token_usage{model_name="m"} 0.5
"""
LLAMA_METRICS = "llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n"
TRTLLM_METRICS = [
    {
        "numActiveRequests": 2,
        "numQueuedRequests": 1,
        "kvCacheStats": {"usedNumBlocks": 7, "maxNumBlocks": 90, "tokensPerBlock": 32},
    }
]
OPENAPI: dict[str, Any] = {
    "paths": {
        "/v1/chat/completions": {"post": {}},
        "/tokenize": {"post": {}},
        "/v1/rerank": {"post": {}},
        "/v1/models": {"get": {}},
        "/v1/models/{id}": {"delete": {}},
        "/v1/responses/{id}": {"get": {}, "delete": {}, "head": {}, "parameters": []},
        "/v1/responses/{id}/cancel": {"post": {}},
        "/v1/server": {"get": {}, "put": {}},
        "/v1/load_lora_adapter": {"post": {}},
        "/sleep": {"post": {}},
    }
}


class State:
    """What the tests set and read."""

    def __init__(self, profile: str, models: list[str]) -> None:
        self.profile = profile
        self.models = models
        self.health = 200
        self.lock = threading.Lock()
        self.seen: dict[str, Any] = {"requests": [], "connections": 0, "aborted": 0}

    def pages(self) -> dict[str, Any]:
        """The JSON or text of each GET path."""
        owner = OWNERS[self.profile]
        rows = [
            {"id": name, "owned_by": owner, "max_model_len": 900, "root": f"org/{name}"}
            for name in self.models
        ]
        if self.profile not in ("vllm", "openai"):
            for row in rows:
                del row["max_model_len"]
        common: dict[str, Any] = {"/v1/models": {"data": rows}, "/health": {}, "/_seen": self.seen}
        own: dict[str, dict[str, Any]] = {
            "vllm": {"/openapi.json": OPENAPI, "/metrics": VLLM_METRICS},
            "sglang": {
                "/metrics": SGLANG_METRICS,
                "/get_server_info": {
                    "page_size": 16,
                    "max_total_num_tokens": 1600,
                    "context_length": 700,
                    "max_running_requests": 33,
                },
            },
            "trtllm": {"/metrics": TRTLLM_METRICS, "/version": {"version": "1"}},
            "llama.cpp": {
                "/metrics": LLAMA_METRICS,
                "/props": {"total_slots": 4, "default_generation_settings": {"n_ctx": 512}},
            },
            "ollama": {"/api/version": {"version": "0.40"}},
            "openai": {},
        }
        return common | own[self.profile]


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    state: State

    def setup(self) -> None:
        super().setup()
        with self.state.lock:
            self.state.seen["connections"] += 1

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        page = self.state.pages().get(self.path)
        if self.path.startswith(("/v1/responses/", "/v1/server")):
            self.echo()
        elif page is None:
            self.answer(404, b'{"detail":"Not Found"}')
        elif self.path in ("/health", "/api/version"):
            self.answer(self.state.health, json.dumps(page).encode())
        elif isinstance(page, str):
            self.answer(200, page.encode(), "text/plain")
        else:
            self.answer(200, json.dumps(page).encode())

    def do_DELETE(self) -> None:
        self.echo()

    def echo(self) -> None:
        """Answer with the request."""
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        names = " ".join(sorted(name.lower() for name in self.headers))
        self.answer(200, f"{self.requestline}\n{names}\n".encode() + body, "application/x-echo")

    def do_POST(self) -> None:
        if self.path.startswith("/v1/responses/"):
            return self.echo()
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        fields = json.loads(body)
        if self.path == "/_set":
            self.state.__dict__.update(fields)
            return self.answer(200, b"{}")
        if self.path == "/api/show":
            kind = "embedding" if fields["model"].startswith("embed") else "completion"
            shown = {"capabilities": [kind], "model_info": {"llama.context_length": 4096}}
            return self.answer(200, json.dumps(shown).encode())
        headers = [[name.lower(), value] for name, value in self.headers.items()]
        with self.state.lock:
            self.state.seen["requests"].append([self.path, headers, body.decode()])
        if fields.get("mode") == "stream":
            return self.stream(fields)
        if fields.get("mode") == "break":
            self.send_response(200)
            self.send_header("content-length", "100")
            self.end_headers()
            self.wfile.write(b"half")
            self.close_connection = True
            return None
        if fields.get("mode") == "drop":  # as a server does with an idle connection
            self.close_connection = True
            return None
        if fields.get("mode") == "silent":
            time.sleep(60)
        return self.answer(fields.get("status", 200), body)

    def stream(self, fields: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.send_header("connection", "keep-alive, x-private")
        self.send_header("x-private", "1")
        self.send_header("x-request-id", "r1")
        self.end_headers()
        piece = b"data: " + b"x" * fields.get("size", 1) + b"\n\n"
        try:
            for _ in range(fields["pieces"]):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                time.sleep(fields.get("pause_s", 0.0))
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            with self.state.lock:
                self.state.seen["aborted"] += 1
            self.close_connection = True

    def answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """Threads that do not keep the process alive."""

    daemon_threads = True
    request_queue_size = 128


if __name__ == "__main__":
    Handler.state = State(sys.argv[2], sys.argv[3:] or ["m"])
    print("loading the model", flush=True)
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
