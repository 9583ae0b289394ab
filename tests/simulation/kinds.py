"""Judges the requests of one kind: those to the API worker, and those that name their worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from api_calls import ABSENT, FORGOTTEN, NOT_FOUND, certain_of_api, lost_api, never_known
from caller import ADAPTER_ABSENT
from pins import UNKNOWN_WORKER, worker_of
from presence import API

if TYPE_CHECKING:
    from box import Box
    from history import Request

__all__ = ["certain_of_kind", "refusal_of_kind"]

_PIN = "either: pin"
_NOT_READY = "is not ready to serve requests yet"
_UNAVAILABLE = "Service temporarily unavailable"
_NONE_ALLOWED = "none of the request's allowed workers"
_WORKER_LOST = "The worker of this model"
"""A worker of texts cannot be replaced in the middle of an answer."""


def certain_of_kind(box: Box, request: Request) -> str:
    """Return what had to happen to ``request``; '' if it is of no such kind."""
    if box.models[request.id] == API:
        return certain_of_api(box, request)
    if request.id in box.pins:
        return "complete" if worker_of(box, request) else _PIN
    return ""


def refusal_of_kind(box: Box, request: Request, error: str, certain: str) -> str | None:
    """Return why the end of ``request`` is not allowed; '' if it is, None if others judge that."""
    if certain in (ABSENT, FORGOTTEN):
        away = error == ADAPTER_ABSENT or (certain == ABSENT and _NOT_READY in error)
        return "" if away else "its adapter was not loaded"
    if box.models[request.id] == API and error.startswith(NOT_FOUND) and certain != "complete":
        return "" if never_known(box, request) else "its frontend knew the model"
    if error == ADAPTER_ABSENT:
        return "its adapter was loaded" if certain == "complete" else ""
    if _WORKER_LOST in error:
        return "" if lost_api(box, request) else "its worker lived"
    if UNKNOWN_WORKER in error or _NONE_ALLOWED in error:
        return "" if certain == _PIN else "its worker lived"
    if certain == _PIN and _UNAVAILABLE in error:
        return ""  # it may not go to another one
    if request.id in box.pins and certain == "complete" and not error:
        return _elsewhere(box, request)
    return None


def _elsewhere(box: Box, request: Request) -> str | None:
    """Return whether another worker than that which it named has served it."""
    named = box.served_by.get(request.id, {}).get("decode_worker_id", 0)
    wanted = box.pins[request.id].worker_id
    if request.status != 200 or named == wanted:
        return None
    return f"it named worker {wanted:x}, {named:x} served it"
