"""Where a request would go, or went: what ``nvext.worker_id`` shows. Spec 5.6."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynamo.frontend.disagg.prefill_request import DECODE_OVERRIDE, Prefilled
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import Routing
from dynamo.router.picker import Decision

if TYPE_CHECKING:
    from dynamo.frontend.requests.dispatch import Dispatch

__all__ = ["located", "shown"]

_PREFILL, _DECODE = "prefill", "decode"


def located(
    dispatch: Dispatch, tokens: Tokens, routing: Routing | None, phase: str, ranks: bool
) -> dict[str, Any]:
    """Where it would go now; nothing is booked. ``phase``: prefill or decode alone, else both.

    Without prefill workers one worker would do both. Raises what :meth:`Picker.pick` raises.
    """
    out: dict[str, Any] = {}
    prefill = dispatch.prefill.locate(tokens, routing) if dispatch.prefill is not None else None
    override = DECODE_OVERRIDE if prefill is not None else None
    if prefill is None or phase != _PREFILL:
        decode = dispatch.picker.pick(None, tokens, routing=routing, override=override)
        out |= _place(_DECODE, decode, ranks) if phase != _PREFILL else {}
        prefill = prefill or decode
    return out if phase == _DECODE else _place(_PREFILL, prefill, ranks) | out


def shown(decision: Decision, prefilled: Prefilled | None, ranks: bool) -> dict[str, Any]:
    """Where it went; ``prefilled`` if its prompt was computed elsewhere."""
    return _place(_PREFILL, prefilled or decision, ranks) | _place(_DECODE, decision, ranks)


def _place(phase: str, place: Decision | Prefilled, ranks: bool) -> dict[str, Any]:
    ids = {f"{phase}_worker_id": place.worker_id}
    return {**ids, f"{phase}_dp_rank": place.dp_rank} if ranks else ids
