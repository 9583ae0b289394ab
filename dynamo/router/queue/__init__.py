"""Requests that wait until a worker has room for their prompt."""

__all__: list[str] = []
