"""Measures a worker over prompt lengths, context lengths and concurrency, for the SLA policy."""

__all__: list[str] = []
