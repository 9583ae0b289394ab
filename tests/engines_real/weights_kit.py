"""Model directories with small random weights: the same files for the same seed.

The tensors are written in the format of safetensors: eight bytes with the length of the header, a
JSON header, the data of all tensors in the order of the header.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from array import array
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from deployment import MODEL
from tokenizer_kit import write_llama_like

HIDDEN = 256
INTERMEDIATE = 512
LAYERS = 2
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64
CONTEXT = 2048
LORA_RANK = 8

_FLOAT32 = 4
_POOL = 1 << 18
_FIRST_BYTE = 3  # the id of <0x00>, after the special tokens
# With one expected end in about thirty tokens, a greedy answer ends by itself or by its limit.
_EOS_SCALE = 1.6
# Logits far apart: rounding must not decide which token is the best.
LOGIT_SCALE = 3.0

Shape = tuple[int, ...]


class Numbers:
    """Normally distributed float32 numbers: windows of one pool, so that millions take no time."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._pool = array("f", [self._random.gauss(0, 1) for _ in range(_POOL)])

    def tensor(self, shape: Shape, scale: float) -> array[float]:
        """``shape`` numbers with this standard deviation."""
        width = shape[-1]
        scaled = array("f", [each * scale for each in self._pool])
        rows = 1
        for size in shape[:-1]:
            rows *= size
        found: array[float] = array("f")
        for _ in range(rows):
            start = self._random.randrange(_POOL - width)
            found += scaled[start : start + width]
        return found


def write_llama(directory: Path, seed: int = 1, **config: Any) -> Path:
    """A Llama with the tokenizer of the example model (byte-level BPE)."""
    shutil.copytree(MODEL, directory)
    _write_weights(directory, seed, **config)
    return directory


def write_byte_llama(directory: Path, seed: int = 2) -> Path:
    """A Llama with SentencePiece-style BPE and byte fallback: a character may take four tokens.

    It never chooses the bytes above ASCII by itself, because at random they are no characters, and
    of such text vLLM drops more than the broken part. A grammar can demand them.
    """
    write_llama_like(directory)
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "add_bos_token": False,
        "chat_template": (
            "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
            "assistant:"
        ),
    }
    path.write_text(json.dumps(settings))
    vocabulary = len(json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"])
    defaults = {"eos_token_id": 2, "repetition_penalty": 1.1}
    (directory / "generation_config.json").write_text(json.dumps(defaults))
    base = {"vocab_size": vocabulary, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    (directory / "config.json").write_text(json.dumps(base))
    _write_weights(directory, seed, never=range(_FIRST_BYTE + 128, _FIRST_BYTE + 256))
    return directory


def write_lora(directory: Path, seed: int = 3) -> Path:
    """A LoRA adapter for :func:`write_llama`, strong enough to change the text."""
    directory.mkdir(parents=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": LORA_RANK,
        "lora_alpha": 2 * LORA_RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj", "o_proj"],
        "base_model_name_or_path": "",
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    rows = {"q_proj": HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM, "o_proj": HIDDEN}
    shapes: dict[str, Shape] = {}
    for layer in range(LAYERS):
        for name, height in rows.items():
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shapes[f"{base}.lora_A.weight"] = (LORA_RANK, HIDDEN)
            shapes[f"{base}.lora_B.weight"] = (height, LORA_RANK)
    numbers = Numbers(seed)
    write_safetensors(
        directory / "adapter_model.safetensors",
        shapes,
        lambda name, shape: numbers.tensor(shape, shape[-1] ** -0.5),
    )
    return directory


def write_safetensors(
    path: Path, shapes: Mapping[str, Shape], numbers: Callable[[str, Shape], array[float]]
) -> None:
    """Write one file of float32 tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size_bytes = _FLOAT32
        for size in shape:
            size_bytes *= size
        header[name] = {
            "dtype": "F32",
            "shape": list(shape),
            "data_offsets": [offset, offset + size_bytes],
        }
        offset += size_bytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, shape in shapes.items():
            file.write(numbers(name, shape).tobytes())


def _write_weights(directory: Path, seed: int, never: Iterable[int] = (), **config: Any) -> None:
    path = directory / "config.json"
    settings = json.loads(path.read_text()) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **config,
    }
    path.write_text(json.dumps(settings))
    vocabulary, eos = settings["vocab_size"], settings["eos_token_id"]
    numbers = Numbers(seed)

    def tensor(name: str, shape: Shape) -> array[float]:
        if name.endswith("norm.weight"):
            return array("f", [1.0]) * shape[0]
        found = numbers.tensor(shape, _scale(name, shape))
        if name == "lm_head.weight":
            for token_id, factor in ((eos, _EOS_SCALE), *((each, 0.0) for each in never)):
                row = slice(token_id * HIDDEN, (token_id + 1) * HIDDEN)
                found[row] = array("f", [factor * each for each in found[row]])
        return found

    write_safetensors(directory / "model.safetensors", llama_shapes(vocabulary), tensor)


def _scale(name: str, shape: Shape) -> float:
    if name == "model.embed_tokens.weight":
        return 1.0
    return (LOGIT_SCALE if name == "lm_head.weight" else 1.0) / math.sqrt(shape[-1])


def llama_shapes(vocabulary: int) -> dict[str, Shape]:
    """The tensors of the small Llama."""
    attention, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (vocabulary, HIDDEN)}
    for layer in range(LAYERS):
        base = f"model.layers.{layer}"
        shapes |= {
            f"{base}.input_layernorm.weight": (HIDDEN,),
            f"{base}.self_attn.q_proj.weight": (attention, HIDDEN),
            f"{base}.self_attn.k_proj.weight": (kv, HIDDEN),
            f"{base}.self_attn.v_proj.weight": (kv, HIDDEN),
            f"{base}.self_attn.o_proj.weight": (HIDDEN, attention),
            f"{base}.post_attention_layernorm.weight": (HIDDEN,),
            f"{base}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{base}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{base}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    shapes["model.norm.weight"] = (HIDDEN,)
    shapes["lm_head.weight"] = (vocabulary, HIDDEN)
    return shapes
