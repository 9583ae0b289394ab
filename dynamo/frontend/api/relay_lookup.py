"""The relayed model of a request whose body names none: GET, DELETE, parameters in the path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import parse_qs

from dynamo.errors import InvalidArgument, ModelNotFound, shorten
from dynamo.frontend.models.model import ModelEntry
from dynamo.http import Exchange
from dynamo.http.patterns import RouteMatch

__all__ = ["RouteModel", "choose_model", "models_with_route", "route_label"]

_MAX_QUERY_FIELDS = 64


class RouteModel(NamedTuple):
    """A model and the route of it that a request matches."""

    entry: ModelEntry
    match: RouteMatch


def models_with_route(entries: Sequence[ModelEntry], exchange: Exchange) -> list[RouteModel]:
    """The relayed models that have the method and path of the request."""
    found = []
    for entry in entries:
        match = entry.patterns.find(exchange.method, exchange.path)
        if match is not None:
            found.append(RouteModel(entry, match))
    return found


def choose_model(found: Sequence[RouteModel], exchange: Exchange) -> RouteModel:
    """The model that the query or a parameter of the path names, else the only one.

    Several models of the same workers count as one: the server sees no difference. Raises
    ModelNotFound and InvalidArgument.
    """
    named = _query_model(exchange.query)
    if named is not None:
        for one in found:
            if named in (one.entry.name, *one.entry.card.model_aliases):
                return one
        raise ModelNotFound(
            f"Route not found: no model `{shorten(named)}` has {exchange.method} of this path"
        )
    for one in found:
        if one.entry.name in (exchange.path[slice(*span)] for span in one.match.spans):
            return one
    served = [one for one in found if one.entry.served] or found
    if len({_workers(one.entry) for one in served}) == 1:
        return served[0]
    names = ", ".join(sorted(one.entry.name for one in served))
    raise InvalidArgument(
        f"Validation: several servers have {exchange.method} of this path; name the model in the "
        f"query, ?model=NAME, one of {shorten(names)}"
    )


def route_label(match: RouteMatch) -> str:
    """The ``endpoint`` label of the metrics, e.g. ``responses_response_id``."""
    path = match.route.partition("/v1/")[2]
    return path.replace("/", "_").replace("{", "").replace("}", "")


def _query_model(query: str) -> str | None:
    if "model=" not in query:
        return None
    try:
        fields = parse_qs(query, max_num_fields=_MAX_QUERY_FIELDS)
    except ValueError as error:
        raise InvalidArgument(f"Validation: query: {error}") from None
    return fields.get("model", [None])[0]


def _workers(entry: ModelEntry) -> frozenset[int]:
    return frozenset(card.instance_id for card in entry.workers.values())
