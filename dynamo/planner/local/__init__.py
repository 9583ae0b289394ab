"""The local connector: changes a deployment of ``dynamo serve`` through circus and leases."""

__all__: list[str] = []
