"""Starts, removes and puts to sleep workers of a running deployment, through its statefile."""

__all__: list[str] = []
