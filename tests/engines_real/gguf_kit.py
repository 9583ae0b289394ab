"""A GGUF file with small random weights, and the llama-server that serves it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from deployment import MODEL

HIDDEN, INTERMEDIATE, LAYERS, HEADS, CONTEXT = 64, 128, 2, 4, 2048
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def write_gguf(path: Path, seed: int = 1, *, ranks: bool = False) -> Path:
    """Write a Llama with the tokenizer of the example model, by the ``gguf`` package; with
    ``ranks`` a reranker in the form of Qwen3's."""
    gguf: Any = importlib.import_module("gguf")
    writer = gguf.GGUFWriter(path, "qwen3" if ranks else "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_file_type(0)
    if ranks:
        writer.add_key_length(HIDDEN // HEADS)
        writer.add_value_length(HIDDEN // HEADS)
        writer.add_pooling_type(gguf.PoolingType.RANK)
        writer.add_classifier_output_labels(["yes", "no"])
    _add_weights(writer, _add_tokenizer(writer), seed, ranks)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any) -> list[str]:
    """Return the tokens by their ids."""
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    settings = json.loads((MODEL / "tokenizer_config.json").read_text())
    config = json.loads((MODEL / "config.json").read_text())
    by_id = {number: text for text, number in tokenizer["model"]["vocab"].items()}
    types = dict.fromkeys(by_id, _NORMAL)
    for token in tokenizer["added_tokens"]:
        by_id[token["id"]] = token["content"]
        types[token["id"]] = _CONTROL if token["special"] else _USER_DEFINED
    numbers = sorted(by_id)
    writer.add_vocab_size(len(numbers))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")  # the same splits as in tokenizer.json
    writer.add_token_list([by_id[number] for number in numbers])
    writer.add_token_types([types[number] for number in numbers])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_chat_template(settings["chat_template"])
    return [by_id[number] for number in numbers]


def _add_weights(writer: Any, tokens: list[str], seed: int, ranks: bool) -> None:
    numpy: Any = importlib.import_module("numpy")
    numbers = numpy.random.default_rng(seed)

    def add(name: str, *shape: int) -> None:
        # Logits far apart: rounding must not decide which token is the best.
        scale = shape[-1] ** -0.5 * (3.0 if name == "output.weight" else 1.0)
        values = (numbers.standard_normal(shape) * scale).astype("float32")
        if name == "output.weight":  # llama-server refuses bytes that are no UTF-8
            values[[not (one.isascii() and one.isalnum()) for one in tokens]] = 0
        writer.add_tensor(name, values)

    def add_norm(name: str, size: int = HIDDEN) -> None:
        writer.add_tensor(name, numpy.ones(size, "float32"))

    add("token_embd.weight", len(tokens), HIDDEN)
    for layer in range(LAYERS):
        add_norm(f"blk.{layer}.attn_norm.weight")
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{part}.weight", HIDDEN, HIDDEN)
        for part in ("attn_q_norm", "attn_k_norm") if ranks else ():
            add_norm(f"blk.{layer}.{part}.weight", HIDDEN // HEADS)
        add_norm(f"blk.{layer}.ffn_norm.weight")
        add(f"blk.{layer}.ffn_gate.weight", INTERMEDIATE, HIDDEN)
        add(f"blk.{layer}.ffn_up.weight", INTERMEDIATE, HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, INTERMEDIATE)
    add_norm("output_norm.weight")
    add("output.weight", len(tokens), HIDDEN)
    if ranks:
        add("cls.output.weight", 2, HIDDEN)
