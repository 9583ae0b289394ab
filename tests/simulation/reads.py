"""The requests that no model answers: what is read of a frontend, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from call import FRONTEND, LISTING, PAD_BYTES, WORKER, Call

__all__ = ["protocol", "reads", "refusals", "watches"]

_VOCABULARY = 4103
"""So many tokens the model has."""
_WITH_MODEL = ("tool_choice", "response_format", "role")
"""Fields that are read with the model at hand."""


def reads() -> Iterator[Call]:
    def get(path: str, says: str, needs: str = FRONTEND, status: int = 200, **fields: Any) -> Call:
        return Call(f"GET {path}", "read", path, method="GET", needs=needs, status=status,
                    says=says, **fields)  # fmt: skip

    yield get("/live", '"status": "live"'.replace(" ", ""))
    yield get("/health", '"status":"healthy"', LISTING)
    yield get("/metrics", "dynamo_component_uptime_seconds")
    yield get("/v1/models", '"id":"{model}"', LISTING)
    yield get("/v1/models?limit=90", '"id":"{model}"', LISTING, headers="anthropic-version: 1\r\n")
    yield get("/v1/models/{model}", '"id":"{model}"', LISTING)
    yield get("/v1/models/{model}/ready", '"ready":true', LISTING)
    yield get("/openapi.json", '"openapi":"3.1.0"')
    yield get("/docs", "", status=303)
    yield get("/v1/status", "{")
    yield get("/v1/requests?limit=5", "{")
    yield get("/busy_threshold", '"thresholds":')
    yield get("/ui/about.json", '"keys":false')
    yield get("/ui/history", "{")
    yield get("/ui/requests", "{")
    yield get("/ui/models", "{")
    yield get("/ui", "<html", headers="accept-encoding: gzip\r\n")
    yield get("/ui/ui.js", "function")
    yield replace(get("/", "", status=307, headers="accept: text/html\r\n"), name="the page")
    yield get("/metrics", "# EOF", headers="accept: application/openmetrics-text\r\n")
    yield get("/v1/route?prompt=where&model={model}", "{", LISTING)
    words = "Tokenize these words"
    text = Call("tokenize", "read", "/tokenize", {"prompt": words}, needs=LISTING,
                says='"tokens":[')  # fmt: skip
    yield text
    chat = {"messages": [{"role": "user", "content": words}], "return_token_strs": True}
    yield replace(text, name="tokenize a chat", body=chat, says='"token_strs":[')
    yield Call("detokenize", "read", "/detokenize", {"tokens": [1200, 1300]}, needs=LISTING,
               says='{"prompt":')  # fmt: skip
    for path, given in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": words}]}),
        ("/v1/completions", {"prompt": words}),
    ):
        yield Call(f"route {path}", "read", "/v1/route", given, needs=LISTING, says="{")


def refusals() -> Iterator[Call]:
    user = [{"role": "user", "content": "Hi"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": user},
        "/v1/completions": {"prompt": "Hi"},
        "/v1/responses": {"input": "Hi"},
        "/v1/messages": {"messages": user, "max_tokens": 5},
        "/v1/messages/count_tokens": {"messages": user},
        "/v1/responses/input_tokens": {"input": "Hi"},
        "/tokenize": {"prompt": "Hi"},
        "/detokenize": {"tokens": [5]},
        "/v1/embeddings": {"input": "Hi"},
    }

    def refused(name: str, path: str, status: int, says: str = "", **fields: Any) -> Call:
        fields = {"needs": FRONTEND} | fields
        return Call(f"{name} {path}", "refusal", path, status=status, says=says, **fields)

    for path, body in bodies.items():
        yield refused("broken", path, 400, sent=b'{"model": "one", "mess')
        yield refused("no object", path, 400, sent=b"[1, 2]")
        yield refused("unknown field", path, 400, "wrong_field", body=body | {"wrong_field": 1})
        yield refused("unknown model", path, 404, "unknown-one", needs=LISTING,
                      body=body | {"model": "unknown-one"})  # fmt: skip
        yield refused("large and broken", path, 400, sent=b"[" + b" " * PAD_BYTES)
    for path, says in (
        ("/v1/planner", "deserialize"),
        ("/busy_threshold", "deserialize"),
        ("/ui/actions", "deserialize"),
        ("/clear_kv_blocks", "takes no fields"),
    ):
        yield refused("broken", path, 400, says, sent=b'{"a"')
    yield refused("unknown action", "/ui/actions", 400, "unknown action",
                  body={"action": "none", "name": "a"})  # fmt: skip
    for query in ("limit=0", "after=x", "a=b"):
        yield refused("GET", f"/v1/requests?{query}", 400, method="GET")
    yield refused("GET", "/ui/history?after=x", 400, "whole number", method="GET")
    yield refused("GET", "/v1/models?limit=0", 400, "limit", method="GET",
                  headers="anthropic-version: 1\r\n")  # fmt: skip
    chat, completions = "/v1/chat/completions", "/v1/completions"
    wrong: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("ax tokens", chat, {"messages": user, "max_tokens": 0}),
        ("emperature", chat, {"messages": user, "temperature": 9}),
        ("messages", chat, {"messages": []}),
        ("tool_choice", chat, {"messages": user, "tool_choice": "required"}),
        ("response_format", chat, {"messages": user, "response_format": {"type": "none"}}),
        ("role", chat, {"messages": [{"role": "unknown-one", "content": "Hi"}]}),
        ("prompt", completions, {"prompt": 5}),
        ("stop", completions, {"prompt": "Hi", "stop": [5]}),
        ("ax tokens", "/v1/responses", {"input": "Hi", "max_output_tokens": 0}),
        ("max_tokens", "/v1/messages", {"messages": user}),
        ("tokens", "/detokenize", {"tokens": [-1]}),
        ("stop", chat, {"messages": user, "stop": [f"{at} never" for at in range(33)]}),
        ("in tokens", completions, {"prompt": "Hi", "max_tokens": 5, "min_tokens": 6}),
        ("emperature", completions, {"prompt": "Hi", "temperature": 2.01}),
        ("op_p", chat, {"messages": user, "top_p": 1.01}),
        ("resence penalty", chat, {"messages": user, "presence_penalty": 2.01}),
        ("requency penalty", chat, {"messages": user, "frequency_penalty": -2.01}),
        ("epetition penalty", chat, {"messages": user, "repetition_penalty": 0}),
    )
    for word, path, body in wrong:
        needs = WORKER if word in _WITH_MODEL else FRONTEND
        yield refused(f"wrong {word}", path, 400, word, needs=needs, body=body)
    previous = {"input": "Hi", "previous_response_id": "resp_none"}
    yield refused("no such response", "/v1/responses", 400, "resp_none", needs=WORKER,
                  body=previous)  # fmt: skip
    yield refused("too long", completions, 400, "maximum context length", needs=WORKER,
                  body={"prompt": [1200] * 70_000})  # fmt: skip
    yield refused("beyond the vocabulary", completions, 400, "vocabulary", needs=WORKER,
                  body={"prompt": [1200, _VOCABULARY]})  # fmt: skip
    yield refused("no embeddings", "/v1/embeddings", 404, needs=WORKER, body={"input": "Hi"})
    yield refused("out of range", "/detokenize", 400, "out of range", needs=LISTING,
                  body={"tokens": [99_999]})  # fmt: skip
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/v1/responses/resp_none", 404),
        ("GET", "/v1/requests/none", 404),
        ("GET", "/v1/models/unknown-one", 404),
        ("GET", "/ui/nothing", 404),
    ):
        yield refused(f"{method}", path, status, method=method)


def watches() -> Iterator[Call]:
    """Streams that last until their client leaves."""
    for path in ("/ui/events", "/ui/logs?name=box_Frontend", "/v1/record"):
        yield Call(f"watch {path}", "watch", path, method="GET", needs=FRONTEND)


def protocol() -> Iterator[Call]:
    """Requests that are written in another way than most, or wrongly."""

    def message(name: str, text: str, status: int, says: str = "") -> Call:
        kind = "read" if status == 200 else "refusal"
        return Call(name, kind, "", needs=FRONTEND, status=status, says=says,
                    message=text.encode())  # fmt: skip

    host = "Host: localhost\r\n"
    post = f"POST /v1/chat/completions HTTP/1.1\r\n{host}Content-Type: application/json\r\n"
    yield message("old", f"GET /live HTTP/1.0\r\n{host}\r\n", 200, "live")
    yield message("absolute", f"GET http://localhost/live HTTP/1.1\r\n{host}\r\n", 200, "live")
    chunks = 'C\r\n{"model": "a\r\n9;x=y\r\n", "wrong"\r\n0\r\nTrailer: a\r\n\r\n'
    yield message("chunked", f"{post}Transfer-Encoding: chunked\r\n\r\n{chunks}", 400)
    yield message("expecting", f"{post}Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{{}}", 400)
    yield message("no length", f"{post}\r\n", 400)
    yield message("too large", f"{post}Content-Length: 99999999999\r\n\r\n", 413)
    yield message("two lengths", f"{post}Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400)
    yield message("no host", "GET /live HTTP/1.1\r\n\r\n", 400)
    yield message("no HTTP", "HELLO\r\n\r\n", 400)
    yield message("many headers", f"GET /live HTTP/1.1\r\n{host}" + "a: b\r\n" * 2000 + "\r\n", 431)
    yield message("long path", f"GET /{'a' * 70_000} HTTP/1.1\r\n{host}\r\n", 414)
    yield message("foreign host", "GET /live HTTP/1.1\r\nHost: elsewhere\r\n\r\n", 403)
