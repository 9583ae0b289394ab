"""One process: its paths, sockets, tasks, file watches, and the order in which it stops."""

__all__: list[str] = []
