"""Metrics, their names, and logs."""

__all__: list[str] = []
