"""A router over live workers: discovery, events and load feed the deciding rooms."""

__all__: list[str] = []
