"""What workers hold: told by their KV events, or predicted from decisions."""

__all__: list[str] = []
