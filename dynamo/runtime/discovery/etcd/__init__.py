"""Discovery in etcd. Imports of it need the extra ``dynamo-appliance[etcd]``."""

__all__: list[str] = []
