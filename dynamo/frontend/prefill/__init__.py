"""Disaggregated serving: prompts wait for a prefill worker, then go on to decode."""

__all__: list[str] = []
