"""What a client says in headers: the same range as in the body, and the header's name in errors."""

from __future__ import annotations

import pytest

from dynamo.errors import InvalidArgument
from dynamo.frontend.requests.headers import routed
from dynamo.protocols.engine import Routing


@pytest.mark.parametrize(
    ("header", "field"),
    [
        ("x-dynamo-request-priority", "priority"),
        ("x-dynamo-request-strict-priority", "strict_priority"),
    ],
)
def test_priorities_have_the_range_of_the_agent_hints(header: str, field: str) -> None:
    for value in (-(2**31), -5, 0, 7, 2**31 - 1):
        found = routed(None, {header: str(value)})
        assert getattr(found, field) == value
    for text in (str(2**31), str(-(2**31) - 1), "1.5", "--1", "-", "", "١", "9" * 5000):
        with pytest.raises(InvalidArgument, match=f"Header '{header}' must be an integer of 32"):
            routed(None, {header: text})


def test_a_tenant_has_its_own_caches() -> None:
    assert routed(None, {"x-tenant-id": "a"}) == Routing(cache_namespace="tenant\na")
    salted = routed(Routing(cache_namespace="b"), {"x-tenant-id": "a"})
    assert salted == Routing(cache_namespace="tenant\na\nb")
    with pytest.raises(InvalidArgument, match="Header 'x-tenant-id' must have at most 4096"):
        routed(None, {"x-tenant-id": "a" * 4097})
    with pytest.raises(InvalidArgument, match="Header 'x-tenant-id' is empty"):
        routed(None, {"x-tenant-id": ""})


def test_no_salt_is_a_tenants_namespace() -> None:
    """Not with prefixes and line breaks of its own either; plain salts are as engines hash them."""
    assert routed(Routing(cache_namespace="a"), {}) == Routing(cache_namespace="a")
    parts = ("a", "b", "tenant\n", "salt\n", "a\nb", "tenant\na", "salt\ntenant\na", "tenant\na\nb")
    seen: dict[str | None, object] = {}
    for tenant in (None, "a", "b", "tenant", "salt"):
        for salt in (None, *parts):
            headers = {} if tenant is None else {"x-tenant-id": tenant}
            found = routed(Routing(cache_namespace=salt), headers)
            assert found is not None
            assert seen.setdefault(found.cache_namespace, (tenant, salt)) == (tenant, salt)


@pytest.mark.parametrize("header", ["x-dynamo-session-id", "x-dynamo-meta-policy-class"])
def test_texts_are_bounded(header: str) -> None:
    """The router keeps them, of many sessions."""
    assert routed(None, {header: "s" * 256}) is not None
    with pytest.raises(InvalidArgument, match=f"Header '{header}' must have at most 256"):
        routed(None, {header: "s" * 257})


def test_headers_win_over_the_body_and_leave_the_rest() -> None:
    body = Routing(priority=3, dp_rank=1, session_id="body")
    assert routed(body, {"x-dynamo-request-priority": "-3"}) == Routing(
        priority=-3, dp_rank=1, session_id="body"
    )
    assert routed(body, {"accept": "*/*"}) is body
    with pytest.raises(InvalidArgument, match="'x-dp-rank' must be a non-negative integer"):
        routed(body, {"x-dp-rank": "-1"})


@pytest.mark.parametrize("text", ["9" * 4300, "9" * 5000, str(2**64), "0" * 21])
def test_ranks_and_ids_have_64_bits(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        routed(None, {"x-dp-rank": text})
    message = caught.value.message
    assert message.startswith("Header 'x-dp-rank' must be a non-negative integer of 64 bits")
    assert len(message) < 200
    assert routed(None, {"x-dp-rank": str(2**64 - 1)}) == Routing(dp_rank=2**64 - 1)
