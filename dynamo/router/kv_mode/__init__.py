"""The kv mode: its picker, the cost of each worker, prompts as block hashes."""

__all__: list[str] = []
