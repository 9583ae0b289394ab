"""Parsers of answers: reasoning and tool calls out of the text of a model, by its format."""

__all__: list[str] = []
