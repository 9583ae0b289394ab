"""From a request body to token ids: validation, template, tokenizer."""

__all__: list[str] = []
