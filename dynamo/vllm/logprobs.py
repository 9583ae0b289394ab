"""vLLM's arrays of log probabilities in the form of ``EngineOutput``.

The rows of both kinds have the token itself first and then the most likely ones, so a request for N
alternatives has N + 1 columns.
"""

from __future__ import annotations

from typing import Any

__all__ = ["prompt_rows", "sample_rows"]


def sample_rows(given: Any) -> tuple[list[float], list[list[dict[str, Any]]] | None]:
    """Return the log probability and the alternatives of each new token.

    The alternatives are None where none were requested.
    """
    ids, logprobs = given[0].tolist(), given[1].tolist()
    own = [row[0] for row in logprobs]
    if not ids or len(ids[0]) < 2:
        return own, None
    top = [
        [
            {"rank": rank, "token_id": token_id, "logprob": logprob}
            for rank, (token_id, logprob) in enumerate(
                zip(row_ids[1:], row[1:], strict=True), start=1
            )
        ]
        for row_ids, row in zip(ids, logprobs, strict=True)
    ]
    return own, top


def prompt_rows(given: Any) -> list[list[dict[str, Any]]]:
    """Return one list per prompt token, that token first with its rank, then the alternatives."""
    ids, logprobs, ranks = given[0].tolist(), given[1].tolist(), given[2].tolist()
    return [
        [
            {"rank": rank if place == 0 else place, "token_id": token_id, "logprob": logprob}
            for place, (token_id, logprob) in enumerate(zip(row_ids, row, strict=True))
        ]
        for row_ids, row, rank in zip(ids, logprobs, ranks, strict=True)
    ]
