"""An engine without a GPU that behaves like one: ``python -m dynamo.mocker``."""

__all__: list[str] = []
