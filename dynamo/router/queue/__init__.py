"""Queues of requests that wait for a worker: order, limits, and when they may go."""

__all__: list[str] = []
