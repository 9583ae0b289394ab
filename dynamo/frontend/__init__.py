"""The front door: OpenAI's API over HTTP, preprocessing, routing, streaming, in one event loop."""

__all__: list[str] = []
