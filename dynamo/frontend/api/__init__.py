"""The HTTP APIs of the frontend, one module each."""

__all__: list[str] = []
