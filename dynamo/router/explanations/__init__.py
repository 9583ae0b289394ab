"""Why a worker was chosen: inputs of a decision, receipts, tables, logs."""

__all__: list[str] = []
