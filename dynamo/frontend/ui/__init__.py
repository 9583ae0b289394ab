"""The web page at /ui: its files, its stream of samples, its buttons."""

__all__: list[str] = []
