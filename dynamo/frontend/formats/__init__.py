"""Formats of tool calls and reasoning, a module per family."""

__all__: list[str] = []
