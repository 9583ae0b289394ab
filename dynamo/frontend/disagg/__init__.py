"""Disaggregated serving: compute a prompt on a prefill worker before decode."""

__all__: list[str] = []
