"""Whether an adapter fits the model: the shapes of both, from the heads of their safetensors files.

vLLM refuses an adapter that is too large for a layer, and copies one that is too small into a part
of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from dynamo.errors import InvalidArgument

_PREFIX = "base_model.model."
_MATRICES = {".lora_A.weight": 1, ".lora_B.weight": 0}
"""The end of a tensor's name, and the dimension of the layer that it must have."""
_FLOATS = frozenset(("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"))
"""Weights of other types are packed: their shapes are not those of the layer."""
_MAX_HEAD_BYTES = 100 << 20


class _Tensor(NamedTuple):
    """What the head of a file says about a tensor."""

    dtype: str
    shape: tuple[int, ...]


class ModelShapes:
    """The layers of the model in ``path``, a directory or another source, which has none here."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._layers: dict[str, _Tensor] | None = None

    def check(self, adapter: str) -> None:
        """Raise InvalidArgument if a matrix of the adapter has another size than its layer.

        Layers that the model's files name otherwise, or have packed, are left to vLLM. Blocking.
        """
        layers = self._read_layers()
        for name, tensor in _tensors(Path(adapter, "adapter_model.safetensors")).items():
            end = next((end for end in _MATRICES if name.endswith(end)), None)
            if end is None or len(tensor.shape) != 2:
                continue
            layer_name = name.removeprefix(_PREFIX).removesuffix(end) + ".weight"
            layer, axis = layers.get(layer_name), _MATRICES[end]
            # In any dimension: GPT-2 and the like store layers transposed.
            if layer is not None and tensor.shape[axis] not in layer.shape:
                raise InvalidArgument(
                    f"the adapter in {adapter} is not one of this model: {name} has the shape "
                    f"{list(tensor.shape)}, {layer_name} has {list(layer.shape)}"
                )

    def _read_layers(self) -> dict[str, _Tensor]:
        if self._layers is None:
            self._layers = {
                name: tensor
                for path in sorted(self._path.glob("*.safetensors"))
                for name, tensor in _tensors(path).items()
                if tensor.dtype in _FLOATS and len(tensor.shape) == 2
            }
        return self._layers


def _tensors(path: Path) -> dict[str, _Tensor]:
    """Return the tensors of a safetensors file; {} for a file that vLLM has to judge."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            head: Any = json.loads(file.read(size)) if size <= _MAX_HEAD_BYTES else {}
        return {
            name: _Tensor(str(fields["dtype"]), tuple(map(int, fields["shape"])))
            for name, fields in head.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
