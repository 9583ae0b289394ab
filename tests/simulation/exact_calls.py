"""Requests at the edge of what is allowed: the last value that is taken, the first that is not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from call import FRONTEND, WORKER, Call
from exact_verbs import MESSAGE
from wire_calls import ORIGIN

__all__ = ["ADMIN", "access_calls", "admin_line", "edges", "proxied", "stops", "wire_edges"]

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_FREQUENT = ("e", "on", "er a", "t c", "s s", "e w", "n t", "ing")
"""Some of these are in each answer, over one token or two."""
_CONTEXT = 131_072
_VOCABULARY = 4103
"""So many tokens the model has."""
ADMIN = "dyn-admin-0123456789abcdef0123456789abcdef"
"""The key of an operator, in boxes that demand keys."""
_LATE = "dyn-carol-0123456789abcdef0123456789abcdef"
"""It is added and removed while the box runs."""
_USER = "dyn-alice-0123456789abcdef0123456789abcdef"


def admin_line() -> str:
    """Return the line of the file of keys for :data:`ADMIN`."""
    return f"admin:operator:{hashlib.sha256(ADMIN.encode()).hexdigest()}\n"


def stops() -> Iterator[Call]:
    """Answers that a stop string cuts, with log probabilities, or to several prompts."""

    def chat(name: str, tokens: int, **fields: Any) -> Call:
        user = [{"role": "user", "content": f"stopped {name}: and so on"}]
        body = {"messages": user, "max_tokens": tokens, **fields}
        return Call(f"stopped chat {name}", "chat", _CHAT, body)

    def completion(name: str, prompt: Any, prompts: int = 1, **fields: Any) -> Call:
        body = {"prompt": prompt, **fields}
        return Call(f"stopped completion {name}", "completions", _COMPLETIONS, body,
                    prompts=prompts)  # fmt: skip

    user = [{"role": "user", "content": MESSAGE}]
    yield Call("chat of a person", "chat", _CHAT, {"messages": user, "max_tokens": 9})
    for number, stop in enumerate(_FREQUENT):
        yield chat(f"at {number}", 60, stop=stop)
    yield chat("late", 60, stop=list(_FREQUENT), min_tokens=30)
    yield chat("with it", 60, stop=list(_FREQUENT[2:]), include_stop_str_in_output=True)
    yield chat("with logprobs", 40, stop=list(_FREQUENT[1:]), logprobs=True, top_logprobs=3)
    yield chat("with three choices", 40, stop=list(_FREQUENT[2:]), n=3)
    yield chat("at an id", 60, stop_token_ids=list(range(300, 600)))
    yield chat("at a late id", 60, stop_token_ids=list(range(300, 600)), min_tokens=30)
    yield completion("of two", ["Say it twice"] * 2, 2, max_tokens=9)
    yield completion("of ids", [[1200, 1300, 1400]] * 3, 3, max_tokens=5)
    yield completion("with logprobs", "Say it once", max_tokens=12, logprobs=3)
    yield completion("echoed", "Say it once", max_tokens=12, echo=True, logprobs=1)
    yield completion("stopped", "Say it once", max_tokens=50, logprobs=1, stop=list(_FREQUENT[2:]))


def edges() -> Iterator[Call]:
    """The last number that each field takes, and the first that it does not."""
    user = [{"role": "user", "content": "At the edge"}]

    def both(field: str, last: Any, first: Any, says: str = "", path: str = _CHAT,
             **more: Any) -> Iterator[Call]:  # fmt: skip
        body = {"messages": user} if path == _CHAT else {"prompt": "At the edge"}
        body = {"max_tokens": 3, **body, **more}
        api, says = "chat" if path == _CHAT else "completions", says or field
        needs = WORKER if field == "prompt" else FRONTEND
        yield Call(f"edge {says} {path}", api, path, {**body, field: last})
        yield Call(f"beyond {says} {path}", "refusal", path, {**body, field: first}, status=400,
                   says=says, needs=needs)  # fmt: skip

    yield from both("temperature", 2, 2.01, "emperature")
    yield from both("top_p", 1, 1.01, "op_p")
    yield from both("presence_penalty", -2, -2.01, "resence")
    yield from both("frequency_penalty", 2, 2.01, "requency")
    yield from both("repetition_penalty", 2, 1_000_001, "epetition")
    yield from both("top_logprobs", 128, 129, "op_logprobs", logprobs=True)
    yield from both("stop", ["x" * 512], ["x" * 513])
    yield from both("stop", [f"{at} never" for at in range(32)],
                    [f"{at} never" for at in range(33)], path=_COMPLETIONS)  # fmt: skip
    yield from both("stop_token_ids", list(range(1024)), list(range(1025)), path=_COMPLETIONS,
                    min_tokens=3)  # fmt: skip
    yield from both("min_tokens", 3, 4, "in tokens")
    yield from both("max_tokens", 1, 0, "ax tokens")
    yield from both("best_of", 1, 129, "est_of", path=_COMPLETIONS)
    yield from both("cache_salt", "s" * 4096, "s" * 4097)
    yield from both("guided_regex", "a" * 16_384, "a" * 16_385)
    yield from both("seed", -(2**63), 2**63)
    yield from both("prompt", [_VOCABULARY - 1, 1200], [1200, _VOCABULARY], "vocabulary",
                    path=_COMPLETIONS)  # fmt: skip
    yield from both("prompt", [1200], [1200] * _CONTEXT, "maximum context length",
                    path=_COMPLETIONS, n=2)  # fmt: skip


def wire_edges() -> Iterator[Call]:
    """Requests that HTTP forbids, each for one reason; and what pages may read."""

    def message(name: str, head: str, status: int, says: str = "", body: bytes = b"",
                headed: tuple[str, ...] = ()) -> Call:  # fmt: skip
        kind = "read" if status == 200 else "refusal"
        text = head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body
        return Call(f"edge of {name}", kind, "", needs=FRONTEND, status=status, says=says,
                    message=text, headed=headed)  # fmt: skip

    host, get = "Host: localhost", "GET /live HTTP/1.1"
    post = f"POST /tokenize HTTP/1.1\n{host}\nContent-Type: application/json\n"
    chunked = f"{post}Transfer-Encoding: chunked"
    yield message("a chunk", chunked, 413, "exceeds", b"ffffffffff\r\n")
    yield message("a trailer", chunked, 400, "railer", b"2\r\n{}\r\n0\r\nContent-Length: 5\r\n\r\n")
    yield message("a short chunk", chunked, 400, "longer", b"1\r\n{}\r\n0\r\n\r\n")
    yield message("a chunk size", chunked, 400, "size", b"x\r\n{}\r\n0\r\n\r\n")
    yield message("two framings", f"{chunked}\nContent-Length: 2", 400)
    yield message("a sign", f"{post}Content-Length: +2", 400)
    yield message("a coding", f"{post}Transfer-Encoding: gzip", 400)
    yield message("a space", "GET /live HTTP/1.1\nHost : localhost", 400)
    yield message("a fold", f"{get}\n{host}\nA: b\n c: d", 400)
    yield message("two hosts", f"{get}\n{host}\n{host}", 400)
    yield message("a nameless header", f"{get}\n{host}\n: b", 400)
    yield message("a version", f"GET /live HTTP/2.0\n{host}", 505)
    yield message("a type", f"POST /tokenize HTTP/1.1\n{host}\nContent-Type: text/plain\n"
                  "Content-Length: 2", 415, body=b"{}")  # fmt: skip
    slow = message("a head that comes slowly", f"{get}\n{host}", 408, "head did not arrive")
    yield replace(slow, drip_s=4.0)
    vary, named = "vary: Origin", f"access-control-allow-origin: {ORIGIN}"
    closed = f"/v1/requests HTTP/1.1\n{host}\nOrigin: {ORIGIN}"
    asked = "Access-Control-Request-Method: GET"
    yield message("a page", f"{get}\n{host}\nOrigin: {ORIGIN}", 200, "live", headed=(vary, named))
    yield message("no page", f"{get}\n{host}", 200, "live", headed=(vary, "-" + named))
    other = f"{get}\n{host}\nOrigin: http://other.example"
    yield message("another page", other, 200, "live", headed=(vary, "-" + named))
    yield message("a closed path", f"GET {closed}", 403, headed=("-" + named,))
    yield message("a closed preflight", f"OPTIONS {closed}\n{asked}", 405, headed=("-" + named,))


def proxied() -> Iterator[Call]:
    """Yield requests for operators' routes through a proxy, which are refused."""
    for header in ("forwarded: for=a", "x-forwarded-for: 10.0.0.1", "x-real-ip: 10.0.0.1",
                   "via: 1.1 proxy"):  # fmt: skip
        name = header.partition(":")[0]
        yield Call(f"proxied {name}", "refusal", "/v1/requests?limit=2", method="GET",
                   needs=FRONTEND, status=403, says="proxy", headers=f"{header}\r\n")  # fmt: skip
        yield Call(f"proxied models {name}", "read", "/live", method="GET", needs=FRONTEND,
                   says="live", headers=f"{header}\r\n")  # fmt: skip
    yield Call("of another site", "refusal", "/v1/requests?limit=2", method="GET", needs=FRONTEND,
               status=403, says="web pages", headers="sec-fetch-site: cross-site\r\n")  # fmt: skip


_PATHS = (
    ("/live", True, False),
    ("/metrics", True, False),
    ("/v1/models", False, False),
    ("/v1/requests?limit=2", False, True),
    ("/v1/status", False, True),
)
"""Paths with whether they are open to all, and whether they are for operators alone."""
_KEYS = {"no": "", "a wrong": "dyn-wrong-0123456789", "a user's": _USER, "an operator's": ADMIN}


def access_calls() -> Iterator[Call]:
    """Each kind of path with each kind of key, in the three ways to send one."""
    for number in range(6):
        yield Call(f"late key {number}", "read", "/v1/models", method="GET", needs=FRONTEND,
                   headers=f"authorization: Bearer {_LATE}\r\n")  # fmt: skip
    for path, is_open, operators in _PATHS:
        for owner, key in _KEYS.items():
            status = 200
            if not is_open and owner in ("no", "a wrong"):
                status = 401
            elif operators and owner == "a user's":
                status = 403
            for number, header in enumerate(("authorization: Bearer {}", "x-api-key: {}",
                                             "Authorization: bearer  {}")):  # fmt: skip
                yield Call(f"{owner} key {number} for {path}", "read" if status == 200 else
                           "refusal", path, method="GET", needs=FRONTEND, status=status,
                           headers=f"{header.format(key)}\r\n" * bool(key))  # fmt: skip
