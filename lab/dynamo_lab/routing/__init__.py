"""Routing modes on a trace, over simulated workers."""

__all__: list[str] = []
