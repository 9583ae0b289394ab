"""OpenAI's embeddings."""

__all__: list[str] = []
