"""Replicas that tell each other of their load."""

__all__: list[str] = []
