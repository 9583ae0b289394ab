"""An adapter of another model is found by its shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo.errors import InvalidArgument
from dynamo.vllm.lora_shapes import ModelShapes

LAYER = "model.layers.0.self_attn.q_proj"


def write(path: Path, shapes: dict[str, list[int]], dtype: str = "F32") -> None:
    path.parent.mkdir(exist_ok=True)
    tensors = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
        for name, shape in shapes.items()
    }
    head = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head)


def adapter(directory: Path, a: list[int], b: list[int]) -> str:
    names = {
        f"base_model.model.{LAYER}.lora_{x}.weight": shape for x, shape in (("A", a), ("B", b))
    }
    write(directory / "adapter_model.safetensors", names)
    return str(directory)


@pytest.fixture
def shapes(tmp_path: Path) -> ModelShapes:
    write(tmp_path / "model" / "a.safetensors", {f"{LAYER}.weight": [512, 256]})
    write(tmp_path / "model" / "b.safetensors", {"lm_head.weight": [900, 256]})
    return ModelShapes(str(tmp_path / "model"))


def test_the_sizes_must_be_those_of_the_layer(shapes: ModelShapes, tmp_path: Path) -> None:
    shapes.check(adapter(tmp_path / "good", [8, 256], [512, 8]))
    shapes.check(adapter(tmp_path / "transposed", [8, 512], [256, 8]))
    for a, b in (([8, 128], [512, 8]), ([8, 256], [128, 8]), ([8, 64], [64, 8])):
        with pytest.raises(InvalidArgument, match=f"is not one of this model: .*{LAYER}"):
            shapes.check(adapter(tmp_path / "bad", a, b))


def test_what_cannot_be_compared_is_left_to_vllm(shapes: ModelShapes, tmp_path: Path) -> None:
    small = adapter(tmp_path / "small", [8, 128], [128, 8])
    write(tmp_path / "packed" / "model.safetensors", {f"{LAYER}.weight": [65536, 1]}, "U8")
    for source in (tmp_path / "packed", tmp_path / "none", "org/model"):
        ModelShapes(str(source)).check(small)
    weights = Path(small, "adapter_model.safetensors")
    for data in (
        b"",
        b"\xff" * 20,
        (4).to_bytes(8, "little") + b"[1]x",
        (2).to_bytes(8, "little") + b"[]",
    ):
        weights.write_bytes(data)
        shapes.check(small)
    write(weights, {"other": [1, 2], f"base_model.model.{LAYER}.lora_A.weight": [8]})
    shapes.check(small)
    weights.unlink()
    shapes.check(small)
