"""What a request asks of the router: its id, headers and ``nvext``, and what its key grants.

And the header that says why a request went to its worker.
"""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Callable, Iterator, Mapping

import msgspec

from dynamo.errors import Forbidden, InvalidArgument, shorten
from dynamo.http.api_keys import ApiKey, Grants
from dynamo.protocols.engine import Routing
from dynamo.protocols.openai import (
    MAX_SALT_CHARACTERS,
    MAX_SESSION_CHARACTERS,
    GenerationRequest,
    NvExt,
)
from dynamo.protocols.pooling import AnyPoolingBody
from dynamo.protocols.status import RouteReceipt
from dynamo.router.decision.decision import Decision
from dynamo.router.decision.receipt import DecisionInputs

_PLAIN_ID = re.compile(r"[A-Za-z0-9._:@+=/-]{1,128}")
_RANDOM = random.Random()
_IDS_A_PREFIX = 1 << 16
_PRIORITY_DIGITS = 10
_INTEGER_DIGITS = 20
_INTEGERS = {
    "x-worker-instance-id": "backend_instance_id",
    "x-dynamo-worker-instance-id": "backend_instance_id",
    "x-prefill-instance-id": "prefill_worker_id",
    "x-dynamo-prefill-instance-id": "prefill_worker_id",
    "x-dp-rank": "dp_rank",
    "x-data-parallel-rank": "dp_rank",
    "x-dynamo-dp-rank": "dp_rank",
    "x-prefill-dp-rank": "prefill_dp_rank",
    "x-dynamo-prefill-dp-rank": "prefill_dp_rank",
}
_PRIORITIES = {
    "x-dynamo-request-priority": "priority",
    "x-dynamo-request-strict-priority": "strict_priority",
}
_CLASS = "x-dynamo-meta-policy-class"
_TEXTS = {
    "x-dynamo-session-id": "session_id",
    _CLASS: "policy_class",
}
_TENANT = "x-tenant-id"
_TENANT_PREFIX = "tenant\n"
_SALT_PREFIX = "salt\n"
_PREFIXES = (_TENANT_PREFIX, _SALT_PREFIX)
"""Tenants have the first; a salt that begins with one of them gets the second, so that none is
that of a tenant. All other salts stay as engines and Dynamo's clients hash them."""
ROUTING_HEADERS = frozenset((*_INTEGERS, *_PRIORITIES, *_TEXTS, _TENANT))
NVEXT_HEADERS = ROUTING_HEADERS - {_TENANT}
"""Those that ``disable_nvext`` ignores; a tenant's caches stay its own."""
ROUTE_HEADER = "x-dynamo-route"
_MOST = 8  # candidates: a header should have less than 1 KB
_PINS = (
    "backend_instance_id",
    "prefill_worker_id",
    "decode_worker_id",
    "dp_rank",
    "prefill_dp_rank",
    "allowed_worker_ids",
    "router_config_override",
)


def _new_request_ids() -> Iterator[str]:
    while True:
        start = str(uuid.UUID(int=_RANDOM.getrandbits(128), version=4))[:24]
        first = _RANDOM.getrandbits(47)
        for number in range(first, first + _IDS_A_PREFIX):
            yield f"{start}{number:012x}"


new_request_id = _new_request_ids().__next__
"""Return a new UUID (version 4). Not a secret: 65,536 in a row differ only in their last digits,
which is ten times as fast as a random one each."""


def request_id(headers: Mapping[str, str], in_body: str | None = None) -> tuple[str, str | None]:
    """Return the internal id, and the client's id, if any, which the response echoes.

    A client's id that is short and plain is the internal one, too, a UUID in its usual form: it is
    in logs, in the ids of responses and in those of engines. Without the header it is ``in_body``.
    """
    client_id = headers.get("x-request-id")
    if client_id is None:
        # Only a plain id from a body: it is echoed in a header.
        if in_body is None or not _PLAIN_ID.fullmatch(in_body):
            return new_request_id(), None
        client_id = in_body
    try:
        return str(uuid.UUID(client_id)), client_id
    except ValueError:
        return (client_id if _PLAIN_ID.fullmatch(client_id) else new_request_id()), client_id


def routed(
    routing: Routing | None,
    headers: Mapping[str, str],
    key: ApiKey | None = None,
    ignores_nvext: bool = False,
) -> Routing | None:
    """Return ``routing`` overridden by the ``ROUTING_HEADERS`` among the headers.

    With ``ignores_nvext`` only the tenant is used. Raises InvalidArgument naming the header, and
    Forbidden if a user's ``key`` does not grant it.
    """
    if routing is not None and (routing.cache_namespace or "").startswith(_PREFIXES):
        salted = f"{_SALT_PREFIX}{routing.cache_namespace}"
        routing = msgspec.structs.replace(routing, cache_namespace=salted)
    if routing is not None and routing.session_id is not None:
        session_id = None if ignores_nvext else _own_session(routing.session_id, key)
        if session_id != routing.session_id:
            routing = msgspec.structs.replace(routing, session_id=session_id)
    if ROUTING_HEADERS.isdisjoint(headers):
        return routing
    changes: dict[str, int | str] = {} if ignores_nvext else _changes(headers, key)
    current = routing or Routing()
    if _TENANT in headers:
        changes["cache_namespace"] = _namespace(headers[_TENANT], current.cache_namespace)
    replace: Callable[..., Routing] = msgspec.structs.replace
    return replace(current, **changes)


def check_nvext(nvext: NvExt | None, key: ApiKey | None) -> None:
    """Check what a client's ``nvext`` asks of the router. Raises Forbidden naming the field."""
    if nvext is None or key is None or key.grants is None:
        return
    hints, constraints = nvext.agent_hints, nvext.routing_constraints
    if hints is not None:
        at = "'nvext.agent_hints."
        _check_level(f"{at}priority'", hints.priority, key, "priority")
        _check_level(f"{at}latency_sensitivity'", hints.latency_sensitivity, key, "priority")
        _check_level(f"{at}strict_priority'", hints.strict_priority, key, "strict_priority")
    if key.grants.routing:
        return
    for name in _PINS:
        if getattr(nvext, name) is not None:
            raise _forbidden(f"'nvext.{name}'", key, "routing")
    if constraints is not None:
        for name in ("required_taints", "preferred_taints"):
            if getattr(constraints, name):
                raise _forbidden(f"'nvext.routing_constraints.{name}'", key, "routing")


def check_router_fields(nvext: NvExt | None, priority: int | None, key: ApiKey | None) -> None:
    """As :func:`check_nvext`, with vLLM's ``priority`` of the request, where low goes first."""
    check_nvext(nvext, key)
    if key is None or key.grants is None or priority is None:
        return
    if -priority > key.grants.priority:
        allowed = f"send at least {-key.grants.priority}, or "
        raise _forbidden(f"'priority' = {shorten(priority)}", key, "priority=N", allowed)


def check_fields(
    request: GenerationRequest | AnyPoolingBody, key: ApiKey | None, ignores_nvext: bool = False
) -> None:
    """Check the fields of a client's request, of any API, that router and engine obey.

    With ``ignores_nvext`` those for the router have no effect. Raises Forbidden naming the field.
    """
    if key is None or key.grants is None:
        return
    if not ignores_nvext:
        check_router_fields(request.nvext, request.priority, key)
    # These name the hosts and blocks of other engines.
    for name in ("kv_transfer_params", "ec_transfer_params"):
        if getattr(request, name, None) is not None and not key.grants.routing:
            raise _forbidden(f"'{name}'", key, "routing")


def check_server_priority(value: object, key: ApiKey | None) -> None:
    """Check the field ``priority`` for another server, of which some prefer low values.

    Raises Forbidden, and InvalidArgument for what a server may take for a number.
    """
    if value is None or key is None or key.grants is None:
        return
    if not isinstance(value, int | float):
        raise InvalidArgument(f"'priority' must be a number, got {shorten(repr(value))}")
    _check_level("'priority'", value, key, "priority", either_way=True)


def _changes(headers: Mapping[str, str], key: ApiKey | None) -> dict[str, int | str]:
    """Return the fields of ``routing`` that the headers set."""
    changes: dict[str, int | str] = {}
    for name, field in _INTEGERS.items():
        if name in headers:
            changes[field] = _integer(name, headers[name])
    for name, field in _PRIORITIES.items():
        if name in headers:
            changes[field] = _priority(name, headers[name])
    for name, field in _TEXTS.items():
        if name in headers:
            changes[field] = _text(name, headers[name])
    if key is not None and key.grants is not None:
        _check_headers(headers, changes, key, key.grants)
    if "session_id" in changes:
        changes["session_id"] = _own_session(str(changes["session_id"]), key)
    return changes


def _own_session(session_id: str, key: ApiKey | None) -> str:
    """Return the session of a user's ``key``; its name has no line break, so none is another's."""
    return session_id if key is None or key.grants is None else f"{key.name}\n{session_id}"


def _check_headers(
    headers: Mapping[str, str], changes: Mapping[str, int | str], key: ApiKey, grants: Grants
) -> None:
    for name, field in _PRIORITIES.items():
        if name in headers:
            _check_level(f"Header '{name}'", int(changes[field]), key, field)
    for name in headers:
        if name in _INTEGERS and not grants.routing:
            raise _forbidden(f"Header '{name}'", key, "routing")
        if name == _CLASS and not grants.classes:
            raise _forbidden(f"Header '{name}'", key, "classes")


def _check_level(
    what: str, level: float | None, key: ApiKey, grant: str, either_way: bool = False
) -> None:
    """Refuse a priority above that of a user's key. A low one needs no grant: it only lets others
    go first."""
    if level is None:
        return
    most = getattr(key.grants, grant)
    if (abs(level) if either_way else level) > most:
        allowed = f"-{most} to {most}" if either_way and most else f"at most {most}"
        name = grant.replace("_", "-")
        raise _forbidden(f"{what} = {shorten(level)}", key, f"{name}=N", f"send {allowed}, or ")


def _forbidden(what: str, key: ApiKey, grant: str, instead: str = "leave it out, or ") -> Forbidden:
    return Forbidden(
        f"{what} is not granted to the API key '{key.name}'; {instead}ask an operator for a key "
        f"with the grant {grant} (dynamo key add --grants)"
    )


def _namespace(tenant: str, salt: str | None) -> str:
    """Return the namespace of a tenant's caches; its own ``cache_salt`` divides that further.

    A header has no line break, so no salt of a tenant gives the namespace of another one.
    """
    if not tenant:
        raise InvalidArgument(f"Header '{_TENANT}' is empty; give a tenant, or leave it out")
    if len(tenant) > MAX_SALT_CHARACTERS:
        raise InvalidArgument(
            f"Header '{_TENANT}' must have at most {MAX_SALT_CHARACTERS} characters, "
            f"got {len(tenant)}"
        )
    name = f"{_TENANT_PREFIX}{tenant}"
    return name if salt is None else f"{name}\n{salt}"


def _text(name: str, text: str) -> str:
    # The router keeps many sessions, and a head may have 32 KiB.
    if len(text) > MAX_SESSION_CHARACTERS:
        raise InvalidArgument(
            f"Header '{name}' must have at most {MAX_SESSION_CHARACTERS} characters, "
            f"got {len(text)}"
        )
    return text


def _integer(name: str, text: str) -> int:
    # int() takes more: spaces, signs, underscores, digits of other scripts, any length.
    if text.isascii() and text.isdecimal() and len(text) <= _INTEGER_DIGITS:
        value = int(text)
        if value < 2**64:
            return value
    raise InvalidArgument(
        f"Header '{name}' must be a non-negative integer of 64 bits, got {shorten(repr(text))}"
    )


def _priority(name: str, text: str) -> int:
    """Parse a priority as in ``nvext.agent_hints``: 32 bits with a sign."""
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdecimal() and len(digits) <= _PRIORITY_DIGITS:
        value = int(text)
        if -(2**31) <= value < 2**31:
            return value
    raise InvalidArgument(
        f"Header '{name}' must be an integer of 32 bits, got {shorten(repr(text))}"
    )


class _Candidate(msgspec.Struct, array_like=True):
    """One row of ``candidates``."""

    worker: str
    dp_rank: int
    overlap: float
    cost: float | None


class _Route(msgspec.Struct, omit_defaults=True):
    """The header. ``request`` is the id for ``dynamo explain``; ``cost`` is in blocks."""

    request: str
    worker: str
    dp_rank: int
    overlap: int
    blocks: int
    queued_ms: float
    mode: str = ""
    index: str = ""
    reason: str = ""
    cost: float | None = None
    prefill_worker: str = ""
    prefill_reason: str = ""
    candidates: list[_Candidate] = []


def route_header(
    request_id: str,
    decision: Decision,
    inputs: tuple[DecisionInputs | None, DecisionInputs | None],
    queued_s: float,
    to_operator: bool,
) -> tuple[str, str]:
    """Return name and value of the header that says why a request went to its worker, in JSON.

    A client asks for it by a header of the same name. It sees its own worker, as in
    ``nvext.worker_id``; the other candidates show the load of other clients, and are for operators.
    ``GET /v1/requests/{id}`` has the terms of the costs. ``inputs`` are those of the (decode)
    worker and of the prefill worker; ``queued_s`` passed until the worker was chosen.
    """
    route = _Route(
        request_id,
        f"{decision.worker_id:x}",
        decision.dp_rank,
        decision.overlap_blocks,
        decision.prompt_blocks,
        round(queued_s * 1e3, 3),
    )
    chosen, prefill = (None if weighed is None else weighed.receipt() for weighed in inputs)
    if chosen is not None:
        route.mode, route.index, route.reason = chosen.mode, chosen.index, chosen.reason
        route.cost = next((row.cost for row in chosen.candidates if row.chosen), None)
        if to_operator:
            route.candidates = _rows(chosen)
    if prefill is not None:
        route.prefill_reason = prefill.reason
        route.prefill_worker = next((row.worker for row in prefill.candidates if row.chosen), "")
    return ROUTE_HEADER, msgspec.json.encode(route).decode()


def _rows(receipt: RouteReceipt) -> list[_Candidate]:
    eligible = [row for row in receipt.candidates if not row.excluded]
    return [
        _Candidate(row.worker, row.dp_rank, row.overlap_blocks, row.cost)
        for row in eligible[:_MOST]
    ]
