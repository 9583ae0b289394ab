"""A small Idefics3 (the architecture of SmolVLM) with random weights: a vision tower, a projection,
and the small Llama."""

from __future__ import annotations

import json
import math
import shutil
from array import array
from pathlib import Path
from typing import Any

from deployment import MODEL
from weights_kit import (
    CONTEXT,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    LOGIT_SCALE,
    Numbers,
    Shape,
    llama_shapes,
    write_safetensors,
)

IMAGE_SIZE = 112
"""Pixels of a side, to which images are scaled."""
_PATCH = 14
_FACTOR = 2  # patches that become one token, in either direction
IMAGE_TOKENS = (IMAGE_SIZE // _PATCH // _FACTOR) ** 2 + 3
"""Tokens of the prompt that an image takes: those of its parts, and three around them."""

_NEW_TOKENS = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
_EOS = 4098
_VISION = 128
_VISION_LAYERS = 1
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_idefics(directory: Path, seed: int = 4) -> Path:
    """A model directory with the tokenizer of the example model and four more tokens."""
    shutil.copytree(MODEL, directory)
    ids = _add_tokens(directory)
    _update(directory / "tokenizer_config.json", chat_template=_TEMPLATE)
    _write_processor(directory)
    vocabulary = max(ids) + 1
    config = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": ids[1],
        "eos_token_id": _EOS,
        "pad_token_id": 4096,
        "scale_factor": _FACTOR,
        "tie_word_embeddings": False,
        "text_config": _text_config(vocabulary),
        "vision_config": _vision_config(),
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    numbers = Numbers(seed)

    def tensor(name: str, shape: Shape) -> array[float]:
        if name.endswith(("norm.weight", "norm1.weight", "norm2.weight")):
            return array("f", [1.0]) * shape[0]
        if name.endswith("bias"):
            return array("f", [0.0]) * shape[0]
        found = numbers.tensor(shape, _scale(name, shape))
        if name == "lm_head.weight":  # the new tokens are never chosen
            found[min(ids) * HIDDEN :] = array("f", [0.0]) * (len(ids) * HIDDEN)
        return found

    write_safetensors(directory / "model.safetensors", _shapes(vocabulary), tensor)
    return directory


def _add_tokens(directory: Path) -> list[int]:
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    last = tokenizer["added_tokens"][-1]
    added = [
        {**last, "id": last["id"] + 1 + number, "content": text, "special": True}
        for number, text in enumerate(_NEW_TOKENS)
    ]
    tokenizer["added_tokens"] += added
    path.write_text(json.dumps(tokenizer))
    path = directory / "tokenizer_config.json"
    known = json.loads(path.read_text())["added_tokens_decoder"]
    for token in added:
        known[str(token["id"])] = {key: value for key, value in token.items() if key != "id"}
    _update(path, added_tokens_decoder=known)
    return [token["id"] for token in added]


def _write_processor(directory: Path) -> None:
    images = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": IMAGE_SIZE},
        "max_image_size": {"longest_edge": IMAGE_SIZE},
        "do_image_splitting": False,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.25, 0.25, 0.25],
        "resample": 1,
        "rescale_factor": 1 / 255,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    both = {"processor_class": "Idefics3Processor", "image_seq_len": IMAGE_TOKENS - 3}
    (directory / "processor_config.json").write_text(json.dumps(both))


def _text_config(vocabulary: int) -> dict[str, Any]:
    return {
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
        "vocab_size": vocabulary,
        "eos_token_id": _EOS,
    }


def _vision_config() -> dict[str, Any]:
    return {
        "model_type": "idefics3_vision",
        "hidden_size": _VISION,
        "intermediate_size": 2 * _VISION,
        "num_hidden_layers": _VISION_LAYERS,
        "num_attention_heads": 2,
        "image_size": IMAGE_SIZE,
        "patch_size": _PATCH,
    }


def _scale(name: str, shape: Shape) -> float:
    if name.endswith(("embed_tokens.weight", "position_embedding.weight")):
        return 1.0
    width = math.prod(shape[1:])
    return (LOGIT_SCALE if name == "lm_head.weight" else 1.0) / math.sqrt(width)


def _shapes(vocabulary: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {
        name if name == "lm_head.weight" else name.replace("model.", "model.text_model.", 1): shape
        for name, shape in llama_shapes(vocabulary).items()
    }
    shapes["model.connector.modality_projection.proj.weight"] = (HIDDEN, _VISION * _FACTOR**2)
    base = "model.vision_model"
    patch = f"{base}.embeddings.patch_embedding"
    shapes |= {f"{patch}.weight": (_VISION, 3, _PATCH, _PATCH), f"{patch}.bias": (_VISION,)}
    positions = (IMAGE_SIZE // _PATCH) ** 2
    shapes[f"{base}.embeddings.position_embedding.weight"] = (positions, _VISION)
    shapes |= _norm(f"{base}.post_layernorm")
    for layer in range(_VISION_LAYERS):
        inner = f"{base}.encoder.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _linear(f"{inner}.self_attn.{name}", _VISION, _VISION)
        shapes |= _linear(f"{inner}.mlp.fc1", 2 * _VISION, _VISION)
        shapes |= _linear(f"{inner}.mlp.fc2", _VISION, 2 * _VISION)
        shapes |= _norm(f"{inner}.layer_norm1") | _norm(f"{inner}.layer_norm2")
    return shapes


def _linear(name: str, rows: int, columns: int) -> dict[str, Shape]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name: str) -> dict[str, Shape]:
    return {f"{name}.weight": (_VISION,), f"{name}.bias": (_VISION,)}


def _update(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
