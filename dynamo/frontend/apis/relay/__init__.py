"""Requests that are relayed to other servers as they are."""

__all__: list[str] = []
