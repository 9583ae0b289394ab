"""GET and POST /busy_threshold: read and set the load above which a worker is busy.

Bodies are those of Dynamo's request rejection page.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from dynamo.errors import shorten
from dynamo.frontend.models.registry import Models
from dynamo.http import Exchange
from dynamo.http.routes import Routes, in_task
from dynamo.router.eligibility.busy import Thresholds
from dynamo.runtime.process.tasks import Tasks

_PATH = "/busy_threshold"
_IDLE = "kept, not in force: needs --admission-control token-capacity"
_NAME_CHARACTERS = 256

log = logging.getLogger(__name__)


class _Change(msgspec.Struct):
    """New values; an absent or null field leaves its value unchanged."""

    model: str
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: Annotated[int, Meta(ge=0)] | None = None
    active_prefill_tokens_threshold_frac: float | None = None


_FIELDS = {
    "active_decode_blocks_threshold": "decode_blocks_share",
    "active_prefill_tokens_threshold": "prefill_tokens",
    "active_prefill_tokens_threshold_frac": "prefill_batch_share",
}
"""Name in a body → field of :class:`Thresholds`."""

_change = msgspec.json.Decoder(_Change).decode


class BusyThresholdRoutes:
    """For operators. Stateless: each model's router holds its thresholds."""

    def __init__(self, models: Models, tasks: Tasks) -> None:
        self._models = models
        self._tasks = tasks

    def install(self, routes: Routes) -> None:
        """Add the routes to the table."""
        routes.get(_PATH, self._list)
        routes.post(_PATH, in_task(self._tasks, self._set))

    def _list(self, exchange: Exchange) -> None:
        """List the models that have a threshold."""
        gates = [(one.name, one.picker.eligibility) for one in self._models.entries() if one.ready]
        rows = [
            _shown(name, eligibility.thresholds, eligibility.admission_control)
            for name, eligibility in gates
            if eligibility.thresholds.any
        ]
        exchange.respond(200, msgspec.json.encode({"thresholds": rows}))

    async def _set(self, exchange: Exchange) -> None:
        try:
            change = _change(exchange.body)
        except msgspec.ValidationError as error:
            _refuse(exchange, 422, str(error))
            return
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            _refuse(exchange, 400, f"Failed to deserialize the JSON body: {error}")
            return
        wrong = _out_of_range(change)
        entry = self._models.named(change.model)
        if wrong:
            _refuse(exchange, 400, wrong)
        elif entry is None or not entry.ready:
            text = f"Model '{shorten(change.model, _NAME_CHARACTERS)}' not found. "
            _refuse(exchange, 404, text + "Thresholds can only be set for discovered models.")
        else:
            given = {field: getattr(change, name) for name, field in _FIELDS.items()}
            given = {field: value for field, value in given.items() if value is not None}
            eligibility = entry.picker.eligibility
            if given:
                await entry.limit(dataclasses.replace(eligibility.thresholds, **given))
            shown = _shown(change.model, eligibility.thresholds, eligibility.admission_control)
            body = msgspec.json.encode(shown)
            idle = "warning" in shown
            if given:
                say = log.warning if idle else log.info
                say("busy thresholds %s: %s", "kept" if idle else "set", body.decode())
            headers = [("warning", f'199 - "{_IDLE}"')] if idle else []
            exchange.respond(200, body, headers=headers)


def _shown(model: str, thresholds: Thresholds, in_force: bool) -> dict[str, Any]:
    row = {"model": model, **{key: getattr(thresholds, field) for key, field in _FIELDS.items()}}
    return row if in_force or not thresholds.any else {**row, "warning": _IDLE}


def _out_of_range(change: _Change) -> str:
    share = change.active_decode_blocks_threshold
    if share is not None and not 0 <= share <= 1:
        return f"active_decode_blocks_threshold must be between 0.0 and 1.0, got {share}"
    fraction = change.active_prefill_tokens_threshold_frac
    if fraction is not None and fraction < 0:
        return f"active_prefill_tokens_threshold_frac must be >= 0.0, got {fraction}"
    return ""


def _refuse(exchange: Exchange, status: int, text: str) -> None:
    exchange.respond(status, msgspec.json.encode({"error": text}))
