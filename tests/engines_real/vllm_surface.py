"""What our code depends on in vLLM's, read from its source without importing it.

``python tests/engines_real/vllm_surface.py DIRECTORY`` compares the package in DIRECTORY, which is
installed or unpacked from a wheel, with the recorded surface. It lists what was added and removed;
with a new release of vLLM that is the list of work. ``--record`` replaces the recorded surface.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

RECORDED = Path(__file__).with_name("vllm_surface.json")
# Classes whose fields are read or sent, by their file.
CLASSES = {
    "entrypoints/openai/chat_completion/protocol.py": (
        *("ChatCompletionRequest", "ChatCompletionResponse", "ChatCompletionResponseChoice"),
        *("ChatCompletionStreamResponse", "ChatCompletionResponseStreamChoice"),
        "BatchChatCompletionRequest",
    ),
    "entrypoints/openai/completion/protocol.py": (
        *("CompletionRequest", "CompletionResponse", "CompletionResponseChoice"),
        *("CompletionStreamResponse", "CompletionResponseStreamChoice"),
    ),
    "entrypoints/pooling/base/protocol.py": (),
    "entrypoints/pooling/classify/protocol.py": (),
    "entrypoints/pooling/embed/protocol.py": (),
    "entrypoints/pooling/pooling/protocol.py": (),
    "entrypoints/pooling/scoring/protocol.py": (),
    "entrypoints/serve/lora/protocol.py": (),
    "entrypoints/serve/tokenize/protocol.py": (),
    "distributed/kv_events.py": ("KVCacheEvent", "BlockStored", "BlockRemoved", "AllBlocksCleared",
                                 "EventBatch", "KVEventBatch"),
    "v1/engine/__init__.py": (
        *("EngineCoreReadyResponse", "EngineCoreRequest", "EngineCoreOutput"),
        *("EngineCoreOutputs", "EngineCoreEvent", "EngineCoreRequestType", "FinishReason"),
    ),
    "v1/metrics/stats.py": ("SchedulerStats", "PrefillStats"),
    "sampling_params.py": ("SamplingParams", "StructuredOutputsParams"),
    "pooling_params.py": ("PoolingParams",),
}  # fmt: skip
"""With their classes; all where none is named."""
FUNCTIONS = {
    "sampling_params.py": ("SamplingParams.from_optional",),
    "v1/engine/core_client.py": (
        *("EngineCoreClient.make_async_mp_client", "AsyncMPClient.add_request_async"),
        *("AsyncMPClient.get_output_async", "AsyncMPClient.abort_requests_async"),
        *("AsyncMPClient.add_lora_async", "AsyncMPClient.remove_lora_async"),
        *("AsyncMPClient.sleep_async", "AsyncMPClient.wake_up_async"),
        *("AsyncMPClient.pause_scheduler_async", "AsyncMPClient.profile_async"),
    ),
    "v1/engine/input_processor.py": ("InputProcessor.process_inputs",),
}
"""Functions that are called, with the names of their parameters."""
REGISTRIES = {
    "tool_parsers/__init__.py": "_TOOL_PARSERS_TO_REGISTER",
    "reasoning/__init__.py": "_REASONING_PARSERS_TO_REGISTER",
}
"""Tables of parsers, by their file."""
Surface = dict[str, list[str]]


def surface(package: Path) -> Surface:
    """Return names by ``file:class`` or ``file:table``; [] for what is not there."""
    found: Surface = {}
    for file, wanted in CLASSES.items():
        classes = _classes(package / file)
        for name in wanted or sorted(classes):
            found[f"{file}:{name}"] = _fields(classes[name]) if name in classes else []
    for file, functions in FUNCTIONS.items():
        classes = _classes(package / file)
        for function in functions:
            owner, _, method = function.partition(".")
            found[f"{file}:{function}"] = _parameters(classes.get(owner), method)
    for file, table in REGISTRIES.items():
        found[f"{file}:{table}"] = sorted(_keys(package / file, table))
    return found


def differences(recorded: Surface, present: Surface) -> list[str]:
    """One line for each name that was added or removed."""
    lines = []
    for place in sorted(recorded.keys() | present.keys()):
        before, after = set(recorded.get(place, ())), set(present.get(place, ()))
        lines += [f"{place}: + {name}" for name in sorted(after - before)]
        lines += [f"{place}: - {name}" for name in sorted(before - after)]
    return lines


def recorded() -> Surface:
    """Return the surface of the release on which the code is tested."""
    names: Surface = json.loads(RECORDED.read_text())
    return names


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])


def _classes(path: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in _tree(path).body if isinstance(node, ast.ClassDef)}


def _fields(node: ast.ClassDef) -> list[str]:
    """The annotated names, those of an enumeration, and the classes it inherits from."""
    names = [f"({ast.unparse(base)})" for base in node.bases]
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names.append(statement.target.id)
        elif isinstance(statement, ast.Assign):
            names += [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return sorted(names)


def _parameters(owner: ast.ClassDef | None, method: str) -> list[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    for node in () if owner is None else owner.body:
        if isinstance(node, kinds) and node.name == method:
            return [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
    return []


def _keys(path: Path, table: str) -> Iterator[str]:
    for statement in _tree(path).body:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Dict):
            continue
        if table in map(ast.unparse, statement.targets):
            yield from (ast.literal_eval(key) for key in statement.value.keys if key is not None)


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("directory", type=Path, help="vLLM's package, the directory `vllm`")
    parser.add_argument("--record", action="store_true", help=f"write {RECORDED.name}")
    arguments = parser.parse_args()
    if not (arguments.directory / "sampling_params.py").is_file():
        parser.error(f"{arguments.directory} is not vLLM's package")
    present = surface(arguments.directory)
    if arguments.record:
        RECORDED.write_text(json.dumps(present, indent=1) + "\n")
        return 0
    lines = differences(recorded(), present)
    print(*lines or ["no difference"], sep="\n")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(_main())
