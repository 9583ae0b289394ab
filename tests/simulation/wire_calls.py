"""Requests of web pages, and requests that are written in unusual but right ways."""

from __future__ import annotations

from collections.abc import Iterator

from call import FRONTEND, Call

__all__ = ["ORIGIN", "wire_calls"]

ORIGIN = "http://page.example"
"""The only origin whose pages may read answers."""
_BODY = b'{"model": "one", "prompt": "Hi", "wrong_field": 1}'


def wire_calls() -> Iterator[Call]:
    def message(name: str, head: str, status: int, says: str = "", body: bytes = b"") -> Call:
        kind = "read" if status == 200 else "refusal"
        text = head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body
        return Call(f"wire {name}", kind, "", needs=FRONTEND, status=status, says=says,
                    message=text)  # fmt: skip

    host = "Host: localhost"
    asked = "Access-Control-Request-Method: POST\nAccess-Control-Request-Headers: authorization"
    options = f"OPTIONS /v1/chat/completions HTTP/1.1\n{host}\n"
    yield message("preflight", f"{options}Origin: {ORIGIN}\n{asked}", 200)
    network = "Access-Control-Request-Private-Network: true"
    yield message("preflight into a network", f"{options}Origin: {ORIGIN}\n{asked}\n{network}", 200)
    yield message("foreign preflight", f"{options}Origin: http://other.example\n{asked}", 405)
    yield message("plain options", options.rstrip("\n"), 405)
    yield message("of a page", f"GET /live HTTP/1.1\n{host}\nOrigin: {ORIGIN}", 200, "live")
    yield message("kept alive", f"GET /live HTTP/1.0\n{host}\nConnection: keep-alive", 200, "live")
    yield message("closed", f"GET /live HTTP/1.1\n{host}\nConnection: close", 200, "live")
    yield message("encoded path", f"GET /v1/m%6Fdels/no%6Ee HTTP/1.1\n{host}", 404)
    post = f"POST /tokenize HTTP/1.1\n{host}\nContent-Type: application/json\n"
    size = f"Content-Length: {len(_BODY)}"
    yield message("whole", f"{post}{size}", 400, "wrong_field", _BODY)
    yield message("expecting", f"{post}{size}\nExpect: 100-continue", 400, "wrong_field", _BODY)
    parts = (_BODY[:7], _BODY[7:8], _BODY[8:])
    chunks = b"".join(b"%x;a=b\r\n%b\r\n" % (len(part), part) for part in parts)
    chunked = f"{post}Transfer-Encoding: chunked"
    ended = chunks + b"0\r\nX-Trailer: a\r\n\r\n"
    yield message("chunks", chunked, 400, "wrong_field", ended)
