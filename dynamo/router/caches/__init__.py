"""The cached blocks of workers: reported by KV events, or predicted from decisions."""

__all__: list[str] = []
