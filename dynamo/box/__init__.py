"""One deployment and its machine, as ``dynamo ps``, ``top`` and ``/ui`` show and operate them."""

__all__: list[str] = []
