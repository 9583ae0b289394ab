"""The load of each worker: what is booked, and how long prefills take."""

__all__: list[str] = []
