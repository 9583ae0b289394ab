"""Fields of forms, found between files of any content."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.http.routes import field_span, is_multipart

TYPE = "multipart/form-data; boundary=b0"


def part(name: str, value: bytes, more: str = "") -> bytes:
    head = f'--b0\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + value + b"\r\n"


def value(body: bytes, name: str = "model", content_type: str = TYPE) -> bytes | None:
    span = field_span(body, content_type, name)
    return None if span is None else body[slice(*span)]


FILE = part("file", b"\r\n\r\nname=model --b0\0\xff\r\n--b", '; filename="a"\r\nContent-Type: a/b')


def test_the_field_between_files() -> None:
    body = FILE + part("model", b"m") + part("stream", b"true") + FILE + b"--b0--\r\n"
    assert value(body) == b"m" and value(body, "stream") == b"true"
    assert value(body, "file") is not None and value(body, "nothing") is None
    assert value(b"preamble\r\n" + body) == b"m"
    assert value(body, content_type='Multipart/form-data; charset=x; Boundary="b0"') == b"m"
    assert value(part("model", b"") + b"--b0--") == b""


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b0--",
        b"--b0\r\nname=model\r\n\r\nx\r\n--b0--",
        part("model", b"m"),  # without an end
        part("a", b"1") * 64 + part("model", b"m") + b"--b0--",
        b"--b0\r\n" + b"x: y\r\n" * 1000 + part("model", b"m") + b"--b0--",
    ],
)
def test_broken_forms(body: bytes) -> None:
    assert value(body) is None


def test_types() -> None:
    assert is_multipart("Multipart/Form-Data; boundary=x")
    assert not is_multipart("application/json") and not is_multipart(None)
    assert value(part("model", b"m") + b"--b0--", content_type="multipart/form-data") is None


@given(st.binary(max_size=200), st.text(max_size=20))
def test_any_file_before_the_field(content: bytes, name: str) -> None:
    if b"\r\n--b0" in content:
        return
    body = part("file", content) + part("model", name.encode()) + b"--b0--"
    if "\r\n--b0" not in name:
        assert value(body) == name.encode()
