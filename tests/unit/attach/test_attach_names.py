"""Names of models, and bodies in which one is replaced."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.attach.models import ModelNames, choose_models
from dynamo.errors import ConfigError

RENAMED = ModelNames({"new": "the/old", "same": "same"})
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@pytest.mark.parametrize(
    ("wanted", "listed", "chosen"),
    [
        (None, ["a", "b"], {"a": "a", "b": "b"}),
        ("b", ["a", "b"], {"b": "b"}),
        ("b, x=a", ["a", "b"], {"b": "b", "x": "a"}),
        ("x", ["a"], {"x": "a"}),
        ("x,y", ["a"], {"x": "a", "y": "a"}),
        ("m:7b=m:7b", ["m:7b"], {"m:7b": "m:7b"}),
    ],
)
def test_choices(wanted: str | None, listed: list[str], chosen: dict[str, str]) -> None:
    assert choose_models(wanted, listed) == chosen


@pytest.mark.parametrize("wanted", ["x", "x=y", "a,x", ","])
def test_bad_choices(wanted: str) -> None:
    with pytest.raises(ConfigError, match="--served-model-name"):
        choose_models(wanted, ["a", "b"])


@settings(max_examples=50)
@given(st.dictionaries(st.text(), VALUES, max_size=5))
def test_all_but_the_name_is_kept(fields: dict[str, Any]) -> None:
    body = json.dumps({**fields, "model": "new"}).encode()
    assert json.loads(RENAMED.rewrite(body)) == {**fields, "model": "the/old"}
    for other in ({**fields, "model": "same"}, {**fields, "model": "unknown"}):
        body = json.dumps(other).encode()
        assert RENAMED.rewrite(body) is body


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"model": 3}', b"{", b'{"a": 1}', b'{"model":"\xff"}']
)
def test_other_bodies_pass_unchanged(body: bytes) -> None:
    assert RENAMED.rewrite(body) is body


def test_the_last_of_two_names_counts() -> None:
    assert RENAMED.rewrite(b'{"model":"x","model":"new"}') == b'{"model":"the/old"}'


def test_the_name_in_a_form() -> None:
    head = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n'
    kind = "multipart/form-data; boundary=b"
    for name, expected in ((b"new", b"the/old"), (b"same", b"same"), (b"\xff", b"\xff")):
        body, changed = (head + each + b"\r\n--b--" for each in (name, expected))
        assert RENAMED.rewrite_form(body, kind) == changed
    assert RENAMED.rewrite_form(b"no form", kind) == b"no form"
