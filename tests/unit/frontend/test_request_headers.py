"""What a client says in headers: the same range as in the body, and the header's name in errors."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynamo.errors import Forbidden, InvalidArgument
from dynamo.frontend.requests.headers import ROUTING_HEADERS, check_nvext, routed
from dynamo.http.api_keys import ApiKey, Grants
from dynamo.protocols.engine import Routing
from dynamo.protocols.openai import AgentHints, NvExt, RoutingConstraints


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


@pytest.mark.parametrize("header", ["x-dp-rank", "x-data-parallel-rank", "x-dynamo-dp-rank"])
def test_each_name_of_a_rank(header: str) -> None:
    assert routed(None, {header: "1"}) == Routing(dp_rank=1)


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


def user(**granted: Any) -> ApiKey:
    return ApiKey("alice", "user", b"", Grants(**granted))


OPERATOR = ApiKey("root", "operator", b"")
RAISING: dict[str, tuple[str, dict[str, Any]]] = {
    "x-dynamo-request-priority": ("1", {"priority": 1}),
    "x-dynamo-request-strict-priority": ("1", {"strict_priority": 1}),
    "x-worker-instance-id": ("7", {"routing": True}),
    "x-prefill-instance-id": ("7", {"routing": True}),
    "x-dp-rank": ("0", {"routing": True}),
    "x-data-parallel-rank": ("0", {"routing": True}),
    "x-dynamo-prefill-dp-rank": ("0", {"routing": True}),
    "x-dynamo-meta-policy-class": ("fast", {"classes": True}),
}


def test_every_routing_header_is_granted_own_or_refused() -> None:
    """Each header that is added later must be in one of these groups."""
    kept = {"x-tenant-id", "x-dynamo-session-id"}
    for name in ROUTING_HEADERS - kept:
        value, granted = RAISING.get(name, ("1", {"routing": True}))
        with pytest.raises(Forbidden, match=f"^Header '{name}'.*API key 'alice'.*--grants"):
            routed(None, {name: value}, user())
        expected = routed(None, {name: value})
        assert expected is not None and expected == routed(None, {name: value}, OPERATOR)
        assert routed(None, {name: value}, user(**granted)) == expected
    for name in kept:
        assert routed(None, {name: "a"}, user()) is not None


@pytest.mark.parametrize("header", ["priority", "strict-priority"])
def test_a_user_may_go_last(header: str) -> None:
    name, field = f"x-dynamo-request-{header}", header.replace("-", "_")
    for value in (0, -1, -(2**31)):
        assert getattr(routed(None, {name: str(value)}, user()), field) == value
    granted = user(**{field: 5})
    assert getattr(routed(None, {name: "5"}, granted), field) == 5
    with pytest.raises(Forbidden, match=r"= 6 is not granted .*; send at most 5, or ask"):
        routed(None, {name: "6"}, granted)
    with pytest.raises(InvalidArgument, match="must be an integer of 32 bits"):
        routed(None, {name: str(2**31)}, user())


def test_sessions_of_two_users_differ() -> None:
    mine = routed(None, {"x-dynamo-session-id": "s"}, user())
    others = ApiKey("bob", "user", b"")
    assert mine is not None and mine != routed(None, {"x-dynamo-session-id": "s"}, others)
    assert mine == routed(None, {"x-dynamo-session-id": "s"}, user())
    assert routed(None, {"x-dynamo-session-id": "s"}, OPERATOR) == Routing(session_id="s")


def test_disable_nvext_ignores_all_headers_but_the_tenants() -> None:
    headers = dict.fromkeys(ROUTING_HEADERS, "not even a number")
    for key in (None, user(), OPERATOR):
        found = routed(None, headers, key, ignores_nvext=True)
        assert found == Routing(cache_namespace="tenant\nnot even a number")


FIELDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "backend_instance_id": (7, {"routing": True}),
    "prefill_worker_id": (7, {"routing": True}),
    "decode_worker_id": (7, {"routing": True}),
    "dp_rank": (0, {"routing": True}),
    "prefill_dp_rank": (0, {"routing": True}),
    "allowed_worker_ids": ([7], {"routing": True}),
    "router_config_override": ({"track_prefill_tokens": False}, {"routing": True}),
    "agent_hints.priority": (1, {"priority": 1}),
    "agent_hints.latency_sensitivity": (0.5, {"priority": 1}),
    "agent_hints.strict_priority": (1, {"strict_priority": 1}),
    "routing_constraints.required_taints": (["a"], {"routing": True}),
    "routing_constraints.preferred_taints": ({"a": 0.5}, {"routing": True}),
}
HARMLESS = {
    *("greed_sampling", "use_raw_prompt", "annotations", "token_data", "max_thinking_tokens"),
    *("extra_fields", "agent_context", "session_control"),
    *("agent_hints.osl", "agent_hints.speculative_prefill"),
}


def test_every_field_of_nvext_is_granted_or_harmless() -> None:
    names = {"agent_hints": AgentHints, "routing_constraints": RoutingConstraints}
    known = set(NvExt.__struct_fields__) - names.keys()
    known |= {f"{name}.{field}" for name, kind in names.items() for field in kind.__struct_fields__}
    assert known == FIELDS.keys() | HARMLESS
    for name, (value, granted) in FIELDS.items():
        outer, _, inner = name.partition(".")
        nvext = msgspec.convert({outer: {inner: value} if inner else value}, NvExt)
        with pytest.raises(Forbidden, match=f"^'nvext.{name}'.* API key 'alice'.*--grants"):
            check_nvext(nvext, user())
        check_nvext(nvext, user(**granted))
        check_nvext(nvext, OPERATOR)
        check_nvext(nvext, None)
    low = AgentHints(priority=-5, strict_priority=-(2**31), latency_sensitivity=0.0)
    check_nvext(NvExt(agent_hints=low), user())
