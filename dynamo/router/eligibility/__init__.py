"""Which workers may take a request: constraints, busy workers, sessions, taints."""

__all__: list[str] = []
