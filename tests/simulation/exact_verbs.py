"""Verbs that operators run in a box where all is quiet, so that what they print and write is known.

Those that compute alone (a trace replayed in virtual time) print what they print without a defect.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import yaml
from call import ANSWERS
from history import Answer

if TYPE_CHECKING:
    from box import Box
    from scenario import Profile
    from shell import Shown

__all__ = [
    "ASKING",
    "KEPT",
    "MESSAGE",
    "MODEL",
    "STATE",
    "check_exact",
    "draw_verbs",
    "files_of",
    "learn_verbs",
    "statefile",
    "write_files",
]

KEPT = "recorded-"
"""How the names of the files begin that these verbs write."""
STATE = "{state}"
MODEL = "{model}"
"""Stand, among the words of a verb, for the state directory and the example model."""
ASKING = ("bench", "chat")
"""Verbs whose requests are those of no client."""
MESSAGE = "What is asked at a shell?"
_TRACE, _KEYS = (f"{STATE}/{KEPT}{name}" for name in ("trace", "keys"))
_GRAPH, _UNITS = f"{STATE}/{KEPT}graph.yaml", f"{STATE}/{KEPT}units"
_BENCH_REQUESTS, _BENCH_TOKENS = 6, 5
_TRACED = 12
_REPLAYED = ("planner", "replay", "--synthetic", "sine:2-16:30", "--duration", "30", "--start-up",
             "2", "--adjustment-interval", "3", "--stop", "1", "--json")  # fmt: skip
_COMPARED = ("bench", "--compare-routing", "--trace", _TRACE, "--json", "--workers")
_COMPUTED: tuple[tuple[str, ...], ...] = (
    (*_REPLAYED, "--policy", "load", "--policy", "hpa:3"),
    (*_REPLAYED, "--policy", "load", "--service-model", "mocker", "--min-residency", "2"),
    (*_REPLAYED, "--policy", "sla", "--ttft", "200", "--itl", "10"),
    (*_REPLAYED, "--policy", "load+sla", "--ttft", "200", "--itl", "10", "--wake", "1"),
    (*_REPLAYED, "--policy", "auto", "--load-predictor", "constant"),
    ("planner", "replay", _TRACE, "--policy", "load", "--policy", "fixed:2", "--json", "--score"),
    (*_COMPARED, "2", "--worker-blocks", "8"),
    (*_COMPARED, "4", "--worker-blocks", "40"),
)
"""Verbs that ask no deployment."""


def write_files(directory: Path) -> None:
    """Write what verbs read: a trace, keys that a group may read, models of llama-swap."""
    write_trace(directory)
    keys = directory / _OPEN_KEYS.rpartition("/")[2]
    keys.write_text(f"alice:user:{'0' * 64}\n", encoding="utf-8")
    keys.chmod(0o640)
    own = directory / _KEYS.rpartition("/")[2]
    own.write_text(f"old:user:{'1' * 64}", encoding="utf-8")  # an editor left out the line end
    own.chmod(0o600)
    (directory / f"{KEPT}swap").write_text(_SWAP_TEXT, encoding="utf-8")


@contextlib.contextmanager
def statefile(directory: Path, words: Sequence[str]) -> Iterator[None]:
    """Write the statefile of the namespace that a verb names while it runs."""
    namespace = words[-1]
    name = namespace.removeprefix(KEPT)
    if name not in _STATEFILES or name == namespace:
        yield
        return
    own: dict[str, Any] = {
        "namespace": namespace,
        "circus_endpoint": "ipc:///a",
        "components": {},
        "environment": {"DYNAMO_SERVICE_CONFIG": "{}"},
    }
    path = directory / f"{namespace}.json"
    path.write_text(json.dumps(own | _STATEFILES[name]), encoding="utf-8")
    try:
        yield
    finally:
        path.unlink()


def write_trace(directory: Path) -> None:
    """Write the trace that verbs replay: three conversations of a few turns."""
    rows = [
        {
            "timestamp": number * 300 + number % 3 * 40,
            "input_length": 512 * (1 + number // 3) + 90,
            "output_length": 4 + number % 5,
            "hash_ids": [1, *(10 * (number % 3) + turn for turn in range(2, 3 + number // 3))],
        }
        for number in range(_TRACED)
    ]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (directory / f"{KEPT}trace").write_text(text, encoding="utf-8")


def learn_verbs() -> None:
    """Note what the verbs that compute alone print, in a process of their own."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with os.fdopen(write, "wb") as file:
            file.write(msgspec.json.encode(_printed()))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        ANSWERS.update(msgspec.json.decode(file.read(), type=dict[str, Answer]))
    os.waitpid(pid, 0)


def _printed() -> dict[str, Answer]:
    import tempfile

    from dynamo.cli.main import main

    found = {}
    with tempfile.TemporaryDirectory(prefix="simulate-") as name:
        write_trace(Path(name))
        for words in _COMPUTED:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
                status = main([word.replace(STATE, name) for word in words])
            found[" ".join(words)] = Answer(printed.getvalue(), str(status), 0, 0)
    return found


def draw_verbs(dice: random.Random, profile: Profile) -> Iterator[tuple[str, ...]]:
    """Yield the words of some verbs, in their order."""
    url = ("--url", f"http://127.0.0.1:{8000 + dice.randrange(profile.frontends)}")
    model = ("--model", dice.choice(profile.models))
    chains: tuple[tuple[tuple[str, ...], ...], ...] = (
        (dice.choice(_COMPUTED),),
        (dice.choice(_COMPUTED),),
        tuple(("key", *words, "--api-key-file", _KEYS) for words in _KEY_WORDS),
        (
            ("init", MODEL, "--engine", "mocker", "--name", "fresh", "--workers", "3",
             "--gpus-per-worker", "0", "--access", "local", "--port", "8123", "--yes",
             "--write", _GRAPH),
            ("serve", _GRAPH, "--dry-run"),
            ("install-service", _GRAPH, "--user", "--directory", _UNITS),
            ("install-service", _GRAPH, "--user", "--directory", _UNITS),
        ),
        (
            ("bench", *url, *model, "--requests", str(_BENCH_REQUESTS), "--concurrency", "2",
             "--isl", "24", "--osl", str(_BENCH_TOKENS), "--json", "--goodput", "latency:0.5",
             *dice.choice(((), ("--no-stream",), ("--rate", "9"))),
             *dice.choice(((), ("--endpoint-type", "completions", "--prompt-format", "tokens")))),
        ),
        (("init", "--from", _SWAP, "--write", _SWAPPED, "--yes"),
         ("install-service", _SWAPPED, "--user", "--print")),
        (("chat", MESSAGE, *url, *model, "--max-tokens", "9"),),
        (("key", "list", "--api-key-file", _OPEN_KEYS),
         *(("state", "show", "--json", "--namespace", f"{KEPT}{name}") for name in _STATEFILES)),
        (("list", "--json"), ("version",), ("state", "repair", "--dry-run")),
    )  # fmt: skip
    for chain in dice.sample(chains, 3):
        yield from chain


_SWAP, _SWAPPED = f"{STATE}/{KEPT}swap", f"{STATE}/{KEPT}swapped.yaml"
_SWAP_TEXT = """
healthCheckTimeout: 60
macros:
  server: llama-server --port ${PORT} -ngl 99
models:
  small:
    cmd: ${server} -m /models/small.gguf -c 4096
    aliases: [tiny, mini]
    ttl: 300
  large:
    cmd: |
      ${server}
      -m /models/large.gguf
    env: ["SOME=0"]
  coder:
    cmd: llama-server --port ${PORT} -m /models/coder.gguf
    concurrencyLimit: 4
groups:
  together:
    swap: false
    members: [small, coder]
hooks:
  on_startup:
    preload: [small]
"""
_SWAPPED_SERVICES = {
    "Small": ("llama-server --port {port} -ngl 99 -m /models/small.gguf -c 4096", None,
              {"workers": 1, "idle_timeout": "300s", "aliases": ["tiny", "mini"],
               "hidden": "aliases", "group": ["turns1"]}),
    "Large": ("llama-server --port {port} -ngl 99 -m /models/large.gguf", None,
              {"workers": 0, "idle_timeout": "never", "envs": {"SOME": "0"},
               "group": ["turns1", "turns2"]}),
    "Coder": ("llama-server --port {port} -m /models/coder.gguf", 4,
              {"workers": 0, "idle_timeout": "never", "group": ["turns2"]}),
}  # fmt: skip
"""What services become of it: command, limit and arguments. Two groups of models take turns."""
_OPEN_KEYS = f"{STATE}/{KEPT}open"
_STATEFILES: dict[str, dict[str, Any]] = {
    "newer": {"version": 2},
    "foreign": {"version": 1, "other": {"a": 1}},
    "unnamed": {"version": 1, "namespace": "another"},
}
"""What statefiles have beside what each has: the first and the last cannot be read."""
_UNREADABLE = {
    _OPEN_KEYS: "has mode 0640",
    f"{KEPT}newer": "has version 2",
    f"{KEPT}unnamed": "belongs to namespace 'another'",
}
"""The last words of verbs that read these, and what they say."""
_KEY_WORDS = (
    ("add", "alice"),
    ("add", "root", "--role", "operator"),
    ("add", "alice"),
    ("add", "alice.b"),
    ("list",),
    ("remove", "alice"),
    ("remove", "bob"),
    ("list",),
)
_KEPT_KEYS = {"old", "root", "alice.b"}


def files_of(directory: Path) -> dict[str, str]:
    """Return the files that these verbs have written."""
    paths = sorted(path for path in directory.glob(f"{KEPT}*") if path.is_file())
    paths += sorted(directory.glob(f"{KEPT}units/*"))
    return {path.name: path.read_text(errors="replace") for path in paths}


def check_exact(box: Box, shown: Shown, serves: Callable[[str], bool]) -> Iterator[str]:
    """Yield what is wrong with what a verb printed and wrote. ``serves``: a model has a worker."""
    words = shown.words
    known = ANSWERS.get(" ".join(words))
    if known is not None:
        if (shown.out, str(shown.status)) != (known.text, known.finish_reason):
            yield f"status {shown.status}, {_difference(shown.out, known.text)}"
    elif words in _COMPUTED:
        if shown.status:
            yield f"status {shown.status}: {shown.err[-300:]}"
        else:
            yield from _rows(json.loads(shown.out))
    elif words[0] in ASKING:
        yield from _asked(shown, serves(words[words.index("--model") + 1]))
    else:
        yield from _written(box, shown)


def _difference(out: str, known: str) -> str:
    at = next((at for at, (one, other) in enumerate(zip(out, known, strict=False)) if one != other),
              min(len(out), len(known)))  # fmt: skip
    return f"{out[max(at - 40, 0) : at + 60]!r} instead of {known[max(at - 40, 0) : at + 60]!r}"


def _rows(found: Any) -> Iterator[str]:
    """Each policy, each mode has served the same requests."""
    if isinstance(found, dict):
        rows = [*found["policies"], *(found.get("fixed") or ())]
        if len({row["requests"] for row in rows}) != 1 or any(row["failed"] for row in rows):
            yield f"not all requests in each policy: {rows}"
    elif any(not 0 <= row["hit_rate"] <= 1 or row["busiest"] < 1 for row in found):
        yield f"a share that cannot be: {found}"


def _asked(shown: Shown, is_served: bool) -> Iterator[str]:
    """What a load, or a person, got of a model that has a worker."""
    if shown.status:
        if is_served:
            yield f"status {shown.status}: {shown.err[-300:]}"
        return
    if shown.words[0] == "chat":
        wanted = ANSWERS["chat of a person"].text
        if shown.out.rstrip("\n") != wanted:
            yield f"{shown.out!r} instead of {wanted!r}"
        return
    yield from _load(shown, json.loads(shown.out), is_served)


def _load(shown: Shown, found: Any, is_served: bool) -> Iterator[str]:
    """The figures of a load are those of its requests."""
    tokens = _BENCH_REQUESTS * _BENCH_TOKENS
    for name, wanted_count in (("requests", _BENCH_REQUESTS), ("completed", _BENCH_REQUESTS),
                               ("output_tokens", tokens)):  # fmt: skip
        if found[name] != wanted_count and is_served:
            yield f"{name} is {found[name]}, not {wanted_count}"
    if "tokens" in shown.words and found["prompt_tokens"] != 24 * _BENCH_REQUESTS:
        yield f"prompt_tokens is {found['prompt_tokens']}"
    if found["good_requests"]:
        yield f"{found['good_requests']} requests took half a millisecond"
    for name in ("ttft_ms", "itl_ms", "latency_ms"):
        spread = found.get(name)
        if spread and not 0 <= spread["p50"] <= spread["p90"] <= spread["p99"] == spread["max"]:
            yield f"{name} is {spread}"


def _written(box: Box, shown: Shown) -> Iterator[str]:
    """What a verb has written, or printed of what it would do."""
    files = shown.later.get("files", {})
    if shown.words[-1] in _UNREADABLE:
        if not shown.status or _UNREADABLE[shown.words[-1]] not in shown.err:
            yield f"status {shown.status}: {shown.out[:100]!r} {shown.err[:300]!r}"
        return
    if shown.words[0] == "key":
        yield from _key(shown, files.get(f"{KEPT}keys", ""))
        return
    if shown.status:
        yield f"status {shown.status}: {shown.err[-300:]}"
        return
    judges = {"init": _init, "serve": _plan, "install-service": _unit}
    if shown.words[0] in judges:
        yield from judges[shown.words[0]](box, shown, files)
    elif shown.words[0] == "list":
        rows = {row["path"]: row for row in msgspec.json.decode(shown.out)}
        row = rows.get(str(box.model_path), {"served_by": []})
        if not {f"box/{one}" for one in box.profile.services} <= set(row["served_by"]):
            yield f"it lists {shown.out!r}"
    elif shown.words[0] == "version" and "dynamo-appliance " not in shown.out:
        yield f"it printed {shown.out!r}"


def _init(box: Box, shown: Shown, files: Mapping[str, str]) -> Iterator[str]:
    if "--from" in shown.words:
        yield from _converted(files)
        return
    graph = yaml.safe_load(files.get(f"{KEPT}graph.yaml", "")) or {}
    frontend, worker = graph.get("Frontend", {}), graph.get("Worker", {})
    own = {name: frontend.get(name) for name in ("http-port", "http-host")}
    own |= {name: worker.get(name) for name in ("run", "served-model-name")}
    own["workers"] = worker.get("ServiceArgs", {}).get("workers")
    if [*own.values()] != [8123, "127.0.0.1", "dynamo.mocker", "fresh", 3]:
        yield f"it wrote {graph}"


def _converted(files: Mapping[str, str]) -> Iterator[str]:
    """A configuration of llama-swap as a graph: nothing of it is lost."""
    graph = yaml.safe_load(files.get(f"{KEPT}swapped.yaml", "")) or {}
    for name, wanted in _SWAPPED_SERVICES.items():
        service = graph.get(name, {})
        own = (service.get("exec"), service.get("engine-request-limit"), service.get("ServiceArgs"))
        if own != wanted or service.get("served-model-name") != name.lower():
            yield f"{name} is {service}"


def _plan(box: Box, shown: Shown, files: Mapping[str, str]) -> Iterator[str]:
    workers = [f"dynamo_Worker{number}" for number in ("", "_1", "_2")]
    for text in ("namespace dynamo", "dynamo_Frontend ", "--http-port 8123", *workers):
        if f"{text} " not in f"{shown.out} ".replace("\n", " \n").replace(",", " "):
            yield f"its plan lacks {text!r}"
    if "dynamo_Worker_3" in shown.out:
        yield "its plan has a fourth worker"


def _unit(box: Box, shown: Shown, files: Mapping[str, str]) -> Iterator[str]:
    path, unit = shown.words[1].replace(STATE, str(box.state)), files.get("dynamo.service", "")
    unit = shown.out if "--print" in shown.words else unit
    for text in (f" serve {path}\n", f" reload {path}\n", "WantedBy=default.target"):
        if text not in unit:
            yield f"its unit lacks {text!r}"


def _key(shown: Shown, text: str) -> Iterator[str]:
    """Keys are in the file from their addition to their removal, by digest, each name once."""
    action, *rest = shown.words[1:]
    name = rest[0]
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    if action == "add" and not shown.status:
        role = "operator" if "operator" in rest else "user"
        digest = hashlib.sha256(shown.out.strip().encode()).hexdigest()
        if lines.get(name) != f"{role}:{digest}":
            yield f"the file has {lines.get(name)!r} for {name}, its key is {shown.out!r}"
    elif action == "add" and "alice" not in shown.err:
        yield f"status {shown.status}: {shown.err!r}"
    elif action == "remove":
        if bool(shown.status) != (name == "bob") or name in lines or not lines.keys() >= _KEPT_KEYS:
            yield f"status {shown.status}, the file has {sorted(lines)}"
    elif action == "list":
        found = {line.split()[0] for line in shown.out.splitlines()[1:]}
        if found != lines.keys() or shown.status:
            yield f"status {shown.status}, {sorted(found)} instead of {sorted(lines)}"
