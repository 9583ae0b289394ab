"""``python -m dynamo.vllm``: a vLLM engine behind the router."""

__all__: list[str] = []
