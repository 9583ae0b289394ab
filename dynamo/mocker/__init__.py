"""A simulated engine, without a GPU: ``python -m dynamo.mocker``."""

__all__: list[str] = []
