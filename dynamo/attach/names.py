"""The names under which models are offered, and the model name in a request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from urllib.parse import quote, unquote_plus

import msgspec

from dynamo.errors import ConfigError
from dynamo.http.multipart import field_span

__all__ = ["ModelNames", "choose_models"]

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NAME = msgspec.json.Decoder(str)
_encode = msgspec.json.encode


def choose_models(wanted: str | None, listed: Sequence[str]) -> dict[str, str]:
    """Return {name to offer: name in the server}; by default every listed one.

    ``wanted`` is the value of ``--served-model-name``: names that the server lists, or
    ``name=server_name``. A new name alone renames the only model. Raises ConfigError.
    """
    if not wanted:
        return {name: name for name in listed}
    chosen: dict[str, str] = {}
    for word in filter(None, (word.strip() for word in wanted.split(","))):
        name, _, server_name = word.partition("=")
        if not server_name:
            server_name = name if name in listed or len(listed) != 1 else listed[0]
        if server_name not in listed:
            raise ConfigError(
                f"--served-model-name {word!r}: the server has no model {server_name!r}, only "
                f"{', '.join(listed)}; give one of these, or NAME=SERVER_NAME"
            )
        chosen[name] = server_name
    if not chosen:
        raise ConfigError(f"--served-model-name {wanted!r} names no model")
    return chosen


class ModelNames:
    """Replaces the name of a renamed model in requests."""

    def __init__(self, chosen: dict[str, str] | None = None) -> None:
        self._renamed = {
            name: _encode(server_name)
            for name, server_name in (chosen or {}).items()
            if name != server_name
        }

    def rewrite(self, body: bytes) -> bytes:
        """Return ``body`` with the server's own name of its model, all other values unchanged.

        Without a renamed model, and for a body that is no JSON object with such a ``model``, the
        body itself. O(size), only if a model is renamed.
        """
        if not self._renamed:
            return body
        try:
            fields = _FIELDS.decode(body)
            name = _NAME.decode(fields["model"])
        except (msgspec.MsgspecError, KeyError, UnicodeDecodeError):
            return body
        server_name = self._renamed.get(name)
        if server_name is None:
            return body
        fields["model"] = msgspec.Raw(server_name)
        return _encode(fields)

    def rewrite_target(self, target: str, spans: Iterable[tuple[int, int]]) -> str:
        """As :meth:`rewrite`, of path and query: ``spans`` are the parameters of the path."""
        if not self._renamed:
            return target
        path, mark, query = target.partition("?")
        for begin, end in sorted(spans, reverse=True):
            path = path[:begin] + self._quoted(path[begin:end]) + path[end:]
        fields = query.split("&")
        for number, field in enumerate(fields):
            if field.startswith("model="):
                fields[number] = f"model={self._quoted(field[6:])}"
        return f"{path}{mark}{'&'.join(fields)}"

    def rewrite_form(self, body: bytes, content_type: str) -> bytes:
        """As :meth:`rewrite`, of a form with files."""
        span = field_span(body, content_type, "model") if self._renamed else None
        if span is None:
            return body
        begin, end = span
        server_name = self._renamed.get(body[begin:end].decode(errors="replace"))
        if server_name is None:
            return body
        return b"".join((body[:begin], _NAME.decode(server_name).encode(), body[end:]))

    def _quoted(self, text: str) -> str:
        """The server's name for ``text`` from a URL, else ``text``."""
        server_name = self._renamed.get(unquote_plus(text))
        return text if server_name is None else quote(_NAME.decode(server_name), safe="")
