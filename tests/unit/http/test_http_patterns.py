"""Routes with methods and parameters: which paths they match."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.http.routes import RoutePatterns

PATTERNS = RoutePatterns(
    (
        "GET /v1/files/{id}",
        "GET /v1/files/{id}/content",
        "GET /v1/files/newest",
        "DELETE /v1/files/{id}",
        "POST /v1/a.b/{x}/c/{y}",
    )
)


@pytest.mark.parametrize(
    ("method", "path", "route", "values"),
    [
        ("GET", "/v1/files/f-1", "GET /v1/files/{id}", ["f-1"]),
        ("GET", "/v1/files/newest", "GET /v1/files/newest", []),
        ("DELETE", "/v1/files/newest", "DELETE /v1/files/{id}", ["newest"]),
        ("GET", "/v1/files/...", "GET /v1/files/{id}", ["..."]),
        ("POST", "/v1/a.b/1/c/2", "POST /v1/a.b/{x}/c/{y}", ["1", "2"]),
    ],
)
def test_matches(method: str, path: str, route: str, values: list[str]) -> None:
    found = PATTERNS.find(method, path)
    assert found is not None and found.route == route
    assert [path[slice(*span)] for span in found.spans] == values


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/files/", "/v1/files/.", "/v1/files/..", "/v1/files/../content", "/v1/files/a b"),
        *("/v1/x/y", "/v1/files/a\n", "/v1/files/é", "/v1/files/a?b", "/v1/aXb/1/c/2"),
        "/v1/files/" + "a" * 257,
    ],
)
def test_does_not_match(path: str) -> None:
    assert not any(PATTERNS.find(method, path) for method in ("GET", "POST", "DELETE", "PUT"))


@pytest.mark.parametrize(
    "route",
    [
        *("/v1/files", "PUT /v1/files", "GET /v2/files", "GET /v1/{a}{b}", "GET /v1/a//b"),
        *("GET /v1/a?b", "GET /v1/(", "GET /v1/../a", "GET /v1/{id", "GET /v1/{é}"),
        "get /v1/files",
    ],
)
def test_malformed_routes_are_ignored(route: str) -> None:
    assert RoutePatterns([route]).routes == frozenset()


@given(st.text(max_size=20))
def test_a_parameter_is_one_plain_segment(text: str) -> None:
    found = PATTERNS.find("DELETE", f"/v1/files/{text}")
    if found is not None:
        assert text.isascii() and text.isprintable() and not {*"/?#% "} & {*text}
        assert text not in (".", "..")
