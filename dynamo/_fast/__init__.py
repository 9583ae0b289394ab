"""Compiled hot paths: bytes and integers in, small answers out, no domain objects."""

__all__: list[str] = []
