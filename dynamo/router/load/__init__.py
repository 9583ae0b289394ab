"""The load of running requests: reservations, and estimates of prefill progress."""

__all__: list[str] = []
