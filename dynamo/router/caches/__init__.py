"""Prompts as block hashes, and the cached blocks of workers: reported or predicted."""

__all__: list[str] = []
