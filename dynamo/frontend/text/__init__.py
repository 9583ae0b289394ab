"""Text and token ids: tokenizers, detokenizers, stop strings."""

__all__: list[str] = []
