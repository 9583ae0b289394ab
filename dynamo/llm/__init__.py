"""What a worker needs to serve a language model: register it, publish its cache and its load."""

__all__: list[str] = []
