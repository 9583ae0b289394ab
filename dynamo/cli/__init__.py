"""The ``dynamo`` command: one module per verb; only these print."""

__all__: list[str] = []
