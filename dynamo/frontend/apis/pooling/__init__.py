"""The APIs of models that pool: embeddings, rerank, score, classify, pooling."""

__all__: list[str] = []
