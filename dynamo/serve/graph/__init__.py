"""The graph file, and the processes that it asks for. Pure."""

__all__: list[str] = []
