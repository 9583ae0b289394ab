"""Measures how fast a model is on this box, for the planner."""

__all__: list[str] = []
