"""Defects of the HTTP server: connections, keys, TLS, pages of other origins."""

from __future__ import annotations

from mutant import Mutant

HTTP = (
    Mutant(
        "a-byte-now-and-then-extends-the-head-deadline",
        "dynamo.http.connection",
        "            self._timing_head = True  #",
        "            self._timing_head = False  #",
        ("unit/http/test_http_connection.py::test_deadlines",),
    ),
    Mutant(
        "bytes-of-a-refused-body-stay-counted",
        "dynamo.http.connection",
        "        self._head = self._body = None\n        self._server.bodies_bytes -= self._counted_bytes\n        self._counted_bytes = 0",
        "        self._head = self._body = None\n        self._counted_bytes = 0",
        (
            "unit/http/test_http_connection.py::test_any_history_of_connections_leaves_nothing_counted",
        ),
    ),
    Mutant(
        "pipelined-bytes-without-a-bound",
        "dynamo.http.connection",
        '        if len(self._buffer) > self._server.limits.header_bytes:\n            self._buffer = b""\n            self._discards',
        '        if False:\n            self._buffer = b""\n            self._discards',
        (
            "unit/http/test_http_connection.py::test_a_client_that_pipelines_too_much_is_closed_after_its_response",
        ),
    ),
    Mutant(
        "lingering-connection-stays-paused",
        "dynamo.http.connection",
        "            self._transport.write_eof()\n        if self._paused:\n            self._resume()",
        "            self._transport.write_eof()",
        ("unit/http/test_http_bounds.py::test_a_refused_backlog_is_read_and_discarded",),
    ),
    Mutant(
        "continue-is-sent-after-the-body",
        "dynamo.http.connection",
        "if head.expects_continue and not first and self._body is not None:",
        "if head.expects_continue:",
        (
            "unit/http/test_http_connection.py::test_a_body_that_came_with_its_head_is_not_asked_for",
        ),
    ),
    Mutant(
        "chunk-size-without-its-limit",
        "dynamo.http.body",
        "        content_bytes = self._parts.tell() + self._remaining\n",
        "        content_bytes = self._parts.tell()\n",
        ("unit/http/test_http_connection.py::test_chunk_framing",),
    ),
    Mutant(
        "trailers-may-name-a-length",
        "dynamo.http.body",
        "        if match[1].lower() in _NOT_IN_TRAILERS:",
        "        if match[1] in _NOT_IN_TRAILERS:",
        ("unit/http/test_http_connection.py::test_chunk_framing",),
    ),
    Mutant(
        "line-break-in-a-header-value",
        "dynamo.http.exchange",
        "{value.translate(_BREAKS)}",
        "{value}",
        ("unit/http/test_http_connection.py::test_streaming",),
    ),
    Mutant(
        "refused-key-works-until-heads-are-forgotten",
        "dynamo.http.api_keys",
        "        old_entries, self.entries = self.entries, entries\n        self._remembered.clear()\n",
        "        old_entries, self.entries = self.entries, entries\n",
        ("unit/http/test_http_access.py::test_rotation_under_load",),
    ),
    Mutant(
        "key-stays-in-the-headers",
        "dynamo.http.api_keys",
        "authorization, x_api_key = (headers.pop(name, None) for name in _CREDENTIALS)",
        "authorization, x_api_key = (headers.get(name) for name in _CREDENTIALS)",
        ("unit/http/test_http_access.py::test_keys_open_and_credentials_go_no_further",),
    ),
    Mutant(
        "operator-made-a-user-is-not-withdrawn",
        "dynamo.http.api_keys",
        "return current is None or (key.operator and not current.operator)",
        "return current is None",
        ("unit/http/test_http_access.py::test_streams_of_a_withdrawn_key_end",),
    ),
    Mutant(
        "key-file-readable-by-its-group",
        "dynamo.http.api_keys",
        "if status.st_mode & 0o077:",
        "if status.st_mode & 0o007:",
        ("unit/http/test_http_access.py::test_a_broken_file_keeps_the_keys",),
    ),
    Mutant(
        "wrong-key-refused-on-open-paths",
        "dynamo.http.access",
        "            if not self.is_open(head.path):\n                raise\n",
        "            raise\n",
        ("unit/http/test_http_access.py::test_wrong_keys",),
    ),
    Mutant(
        "user-key-admitted-as-operator",
        "dynamo.http.access",
        "if key is not None and key.operator:",
        "if key is not None:",
        ("unit/http/test_http_access.py::test_with_keys_only_an_operators_key_counts",),
    ),
    Mutant(
        "operators-routes-through-a-proxy",
        "dynamo.http.access",
        "        if not _FORWARDED.isdisjoint(headers):\n",
        "        if False:\n",
        ("unit/http/test_http_access.py::test_operators_without_keys_call_from_this_machine",),
    ),
    Mutant(
        "cache-gives-one-origin-the-answer-of-another",
        "dynamo.http.cors",
        "(_VARY, *_named_origin(origin))",
        "_named_origin(origin)",
        ("unit/http/test_http_cors.py::test_a_preflight_needs_no_key",),
    ),
    Mutant(
        "preflight-of-a-closed-path",
        "dynamo.http.cors",
        "            and self._allows(headers)\n            and not self._closed(request.path)",
        "            and self._allows(headers)",
        ("unit/http/test_http_cors.py::test_routes_of_operators_and_the_page_stay_closed",),
    ),
    Mutant(
        "renegotiation-without-end",
        "dynamo.http.tls",
        "        context.options |= ssl.OP_NO_RENEGOTIATION  #",
        "        context.options |= 0  #",
        ("unit/http/test_http_tls.py::test_a_client_cannot_renegotiate",),
    ),
    Mutant(
        "handshake-in-the-middle-of-a-turn",
        "dynamo.http.tls_connection",
        "        elif not self._queued:\n            self._queued = True\n            self._decode_later(self)",
        "        elif not self._queued:\n            self.decode()",
        ("unit/http/test_http_tls.py::test_many_handshakes_take_many_turns",),
    ),
    Mutant(
        "answer-without-a-length-is-cut",
        "dynamo.http.client",
        "complete = exc is None and self._until_close and self.status",
        "complete = exc is None and self.status",
        ("unit/http/test_http_client.py::test_failures",),
    ),
    Mutant(
        "interim-answer-ends-the-request",
        "dynamo.http.client",
        "        if self.status >= 200:  #",
        "        if self.status >= 100:  #",
        ("unit/http/test_http_client.py::test_get",),
    ),
)
