"""vLLM's ``/tokenize`` and ``/detokenize``, and prompt counts of other APIs."""

__all__: list[str] = []
