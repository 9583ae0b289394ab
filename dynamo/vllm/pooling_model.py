"""What vLLM knows about its pooling model: the task, how texts are scored, names of classes.

The rules are those of vLLM's own server: one task, the first that the model has; scores by the
cosine of two embeddings, by the products of the vectors of tokens, or by a classifier with one
class that reads both texts.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vllm.model_executor.model_loader import get_model_cls
from vllm.model_executor.models.interfaces import supports_score_template

from dynamo.errors import ConfigError
from dynamo.protocols.pooling import COMPARED, CROSS_ENCODER, MAX_LABEL_BYTES, PoolingFacts

_SERVED = ("embed", "classify", "token_embed", "token_classify")


def find_pooling_facts(processor: Any, tasks: Collection[str]) -> PoolingFacts:
    """Return the facts of the model of ``processor``, whose engine supports ``tasks``.

    Raises ConfigError: it computes something that is not served.
    """
    model, tokenizer = processor.model_config, processor.tokenizer
    task = model.get_pooling_task(tuple(tasks))
    if task not in _SERVED:
        raise ConfigError(
            f"the model pools for {task!r}, the worker serves {', '.join(_SERVED)}; give another "
            "by --pooler-config, or start vLLM's own server and attach it (dynamo.attach)"
        )
    config = model.hf_config
    names = getattr(tokenizer, "model_input_names", ())
    return PoolingFacts(
        task=task,
        scoring=_scoring(model, task),
        separates=bool(model.use_sep_token),
        # A model without the types ends its engine when it is given them.
        token_types="token_type_ids" in names and getattr(config, "type_vocab_size", 0) > 1,
        truncates_left=getattr(tokenizer, "truncation_side", "right") == "left",
        labels=_labels(config) if task == "classify" else [],
    )


def _scoring(model: Any, task: str) -> str:
    # Jina's ranking models read all documents in one input, and have a template in vLLM's code.
    if model.architecture == "JinaForRanking":
        return ""
    if task in COMPARED:
        return COMPARED[task]
    if task != "classify" or getattr(model.hf_config, "num_labels", 0) != 1:
        return ""
    # Such a model has its template in vLLM's code: the frontend cannot make its prompts.
    return "" if supports_score_template(get_model_cls(model)) else CROSS_ENCODER


def _labels(config: Any) -> list[str]:
    """The names by number; none if they are too many, or have gaps."""
    names = getattr(config, "id2label", None) or {}
    labels = [str(names.get(number, "")) for number in range(len(names))]
    size_bytes = sum(len(label.encode()) for label in labels)
    return labels if all(labels) and size_bytes <= MAX_LABEL_BYTES else []
