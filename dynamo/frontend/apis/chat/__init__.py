"""OpenAI's chat and text completions."""

__all__: list[str] = []
