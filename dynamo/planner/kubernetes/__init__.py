"""The planner in a Kubernetes cluster: it scales a graph of Dynamo's operator."""

__all__: list[str] = []
