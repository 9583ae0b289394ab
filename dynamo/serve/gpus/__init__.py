"""GPUs: what the machine has, who holds which, and what an engine needs."""

__all__: list[str] = []
