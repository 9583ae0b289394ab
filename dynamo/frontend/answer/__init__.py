"""From engine outputs to bytes: text, stop strings, chunks, bodies."""

__all__: list[str] = []
