"""Load for any OpenAI endpoint: replayed traces, synthetic prompts, and honest summaries."""

__all__: list[str] = []
