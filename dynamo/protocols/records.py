"""JSON objects of files that several versions read and write: typed, and nothing is lost.

A record keeps the keys that it does not have, and values that are not of its types, and writes
them back: they are of a later version or of another writer.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Self, get_args, get_origin

import msgspec

NO_KEY = "\uffff"
"""Begins the encoded name of a field that is not written."""


class Record(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON object with typed fields; ``unknown`` are its other keys.

    ``always`` names the fields that are written with their default values, too.
    """

    always: ClassVar[frozenset[str]] = frozenset()
    # The name is that of no key, so msgspec's decoder refuses a key that is not a field.
    unknown: dict[str, Any] = msgspec.field(default_factory=dict, name=NO_KEY + "unknown")

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> Self:
        """Return the record that is ``written``."""
        record = cls()
        fields = _fields(cls)
        for key, value in written.items():
            try:
                setattr(record, fields[key].name, _read(fields[key].type, value))
            except (KeyError, msgspec.ValidationError):
                record.unknown[key] = value
        return record

    def written(self) -> dict[str, Any]:
        """Return the JSON object."""
        members = {}
        defaults = _defaults(type(self))
        for key, field in _fields(type(self)).items():
            value = getattr(self, field.name)
            always = field.name in self.always and key not in self.unknown
            if always or value != defaults[key]:
                members[key] = _builtins(value)
        return {**self.unknown, **members}  # a value that is set replaces one of another type


@functools.cache
def _fields(kind: type[Record]) -> dict[str, msgspec.structs.FieldInfo]:
    fields = msgspec.structs.fields(kind)
    return {
        field.encode_name: field for field in fields if not field.encode_name.startswith(NO_KEY)
    }


@functools.cache
def _defaults(kind: type[Record]) -> dict[str, object]:
    """Values to compare with, shared by all records."""
    record = kind()
    return {key: getattr(record, field.name) for key, field in _fields(kind).items()}


def _read(kind: Any, value: object) -> object:
    """Return ``value`` as ``kind``. Raises msgspec.ValidationError."""
    if type(value) is kind and kind is not dict:
        return value  # most of them
    # msgspec itself would drop the unknown keys of a record within a record.
    record, container = _record_in(kind)
    if record is None or value is None:
        return msgspec.convert(value, kind)
    if container is tuple:
        return tuple(record.of(row) for row in msgspec.convert(value, list[dict[str, Any]]))
    if container is dict:
        rows = msgspec.convert(value, dict[str, dict[str, Any]])
        return {key: record.of(row) for key, row in rows.items()}
    return record.of(msgspec.convert(value, dict[str, Any]))


@functools.cache
def _record_in(kind: Any) -> tuple[type[Record] | None, object]:
    """Return the record type that is ``kind`` or in it, and the container that has several."""
    for part in (kind, *get_args(kind)):
        if isinstance(part, type) and issubclass(part, Record):
            return part, get_origin(kind)
    return None, None


def _builtins(value: object) -> object:
    if isinstance(value, Record):
        return value.written()
    if isinstance(value, tuple):
        return [_builtins(item) for item in value]
    if isinstance(value, dict):
        return {key: _builtins(item) for key, item in value.items()}
    return value
