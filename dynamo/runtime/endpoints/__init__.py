"""Endpoints: serving them, admission, health, and clients of their instances."""

__all__: list[str] = []
