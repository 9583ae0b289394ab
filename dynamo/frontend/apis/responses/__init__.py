"""OpenAI's Responses API."""

__all__: list[str] = []
