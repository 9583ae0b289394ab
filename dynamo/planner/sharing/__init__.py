"""Sharing of GPUs between models, and models with no worker."""

__all__: list[str] = []
