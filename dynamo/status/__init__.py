"""What ``dynamo ps``, ``top`` and ``/ui`` show of a deployment."""

__all__: list[str] = []
