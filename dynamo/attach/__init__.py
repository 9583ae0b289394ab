"""``python -m dynamo.attach``: any OpenAI-compatible server behind the router."""

__all__: list[str] = []
