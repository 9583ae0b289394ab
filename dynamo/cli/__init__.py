"""The ``dynamo`` command: one file per verb; the only place that prints."""

__all__: list[str] = []
