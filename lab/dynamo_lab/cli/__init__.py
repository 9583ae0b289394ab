"""The verbs of ``dynamo`` that are parts of the lab; they print."""

__all__: list[str] = []
