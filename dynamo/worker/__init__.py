"""The parts of every engine worker: lifecycle, publishing of KV events and load."""

__all__: list[str] = []
