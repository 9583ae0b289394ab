"""``nvext`` of a request and of its response: where the request would go, or went."""

from __future__ import annotations

from typing import Any, Protocol

from dynamo.frontend.disagg.prefill_request import DECODE_OVERRIDE
from dynamo.frontend.requests.dispatch import Dispatch
from dynamo.frontend.requests.recent import Prefilled
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import Routing
from dynamo.protocols.openai import NvExt
from dynamo.router.picker import Decision

__all__ = ["location", "location_phase", "worker_id_field"]

_PREFILL, _DECODE = "prefill", "decode"
_QUERY = "query_instance_id"


class _Target(Protocol):
    @property
    def worker_id(self) -> int: ...

    @property
    def dp_rank(self) -> int: ...


def location_phase(nvext: NvExt) -> str | None:
    """The phase after ``query_instance_id:``, often ""; None if the request asks for an answer."""
    for annotation in nvext.annotations or ():
        name, _, phase = annotation.partition(":")
        if name == _QUERY:
            return phase
    return None


def location(
    dispatch: Dispatch, tokens: Tokens, routing: Routing | None, phase: str, ranks: bool
) -> dict[str, Any]:
    """The workers that the prompt would go to now; reserves nothing.

    ``phase``: prefill or decode alone, else both. Without prefill workers one worker does both.
    Raises what :meth:`Picker.pick` raises.
    """
    fields: dict[str, Any] = {}
    prefill = dispatch.prefill.locate(tokens, routing) if dispatch.prefill is not None else None
    override = DECODE_OVERRIDE if prefill is not None else None
    if prefill is None or phase != _PREFILL:
        decode = dispatch.picker.pick(None, tokens, routing=routing, override=override)
        fields |= _ids(_DECODE, decode, ranks) if phase != _PREFILL else {}
        prefill = prefill or decode
    return fields if phase == _DECODE else _ids(_PREFILL, prefill, ranks) | fields


def worker_id_field(decision: Decision, prefilled: Prefilled | None, ranks: bool) -> dict[str, Any]:
    """``nvext.worker_id`` of a request that was sent; ``prefilled`` by a prefill worker, if any."""
    return _ids(_PREFILL, prefilled or decision, ranks) | _ids(_DECODE, decision, ranks)


def _ids(phase: str, target: _Target, ranks: bool) -> dict[str, Any]:
    ids = {f"{phase}_worker_id": target.worker_id}
    return {**ids, f"{phase}_dp_rank": target.dp_rank} if ranks else ids
