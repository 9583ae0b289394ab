"""Replay: run policies on a trace in virtual time, and compare what they cost and reach."""

__all__: list[str] = []
