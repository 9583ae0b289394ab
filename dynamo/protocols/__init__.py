"""Wire types: what crosses a socket or lands in a file. No behaviour."""

__all__: list[str] = []
