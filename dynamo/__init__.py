"""dynamo: an LLM-serving appliance for one GPU box."""

__all__ = ["__version__"]

__version__ = "0.1.0"
