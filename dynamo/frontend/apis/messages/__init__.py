"""Anthropic's Messages API."""

__all__: list[str] = []
