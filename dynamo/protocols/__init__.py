"""Wire types: the messages on sockets and the records in stores. No behaviour."""

__all__: list[str] = []
