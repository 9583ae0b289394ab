"""One generation request from dispatch to its last byte, and its metrics."""

__all__: list[str] = []
