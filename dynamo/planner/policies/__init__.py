"""Policies: how many workers each pool should have. Pure: no clock, no I/O."""

__all__: list[str] = []
