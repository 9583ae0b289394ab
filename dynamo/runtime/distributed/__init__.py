"""The runtime of one process, and its endpoints by name."""

__all__: list[str] = []
