"""``dynamo completion bash|zsh|fish``, and what can follow on a command line of ``dynamo``.

The script asks the hidden verb ``__complete`` at each Tab, so it needs no update. An answer takes
less than 0.1 s: nothing here imports more than the options and one YAML file.

A test compares the options in the table of ``main`` with what the verbs load.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any

from dynamo.cli.main import SUBVERBS, VERBS
from dynamo.cli.options import CompletionSettings
from dynamo.config import environ, from_env, load
from dynamo.config.option import fields_of
from dynamo.config.parser import is_switch, option_of
from dynamo.config.programs import settings_groups
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError, StatefileError
from dynamo.runtime.process.paths import expanded, state_path
from dynamo.serve.state.document import Document
from dynamo.serve.state.statefile import Statefile
from dynamo.status.deployment import chosen_runtime

DESCRIPTION = "Print a script for your shell: it completes verbs, options, services and files."
EPILOG = """install it once:
  bash  dynamo completion bash > ~/.local/share/bash-completion/completions/dynamo
  zsh   dynamo completion zsh > ~/.zfunc/_dynamo     with fpath+=~/.zfunc before compinit
  fish  dynamo completion fish > ~/.config/fish/completions/dynamo.fish
or for this shell alone: eval "$(dynamo completion bash)" """
_TEXT_WIDTH = 70
_FILES = "files"
_WORDS = "words"
_SERVICE_ARGS = ("ServiceArgs.workers", "ServiceArgs.resources.gpu", "ServiceArgs.graceful_timeout")
_SCRIPTS = {
    "bash": r"""
_dynamo() {
    local -a found
    mapfile -t found < <("$1" __complete bash "${COMP_LINE:0:COMP_POINT}" 2>/dev/null)
    COMPREPLY=("${found[@]:1}")
    [[ ${found[0]} == files ]] && compopt -o filenames
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=/] ]] && compopt -o nospace
    return 0
}
complete -F _dynamo dynamo
""",
    "zsh": r"""#compdef dynamo
_dynamo() {
    local line
    local -a found open open_texts closed closed_texts
    found=("${(@f)$("${words[1]}" __complete zsh "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    for line in "${found[@]}"; do
        [[ -n $line ]] || continue
        if [[ ${line%%$'\t'*} == *[=/] ]]; then
            open+=("${line%%$'\t'*}") open_texts+=("${line/$'\t'/  -- }")
        else
            closed+=("${line%%$'\t'*}") closed_texts+=("${line/$'\t'/  -- }")
        fi
    done
    (( $#open )) && compadd -S '' -l -d open_texts -a open
    (( $#closed )) && compadd -l -d closed_texts -a closed
}
if [[ $funcstack[1] == _dynamo ]]; then _dynamo "$@"; else compdef _dynamo dynamo; fi
""",
    "fish": r"""
function __dynamo_complete
    set -l words (commandline -opc) (commandline -ct)
    $words[1] __complete fish $words[2..-1] 2>/dev/null
end
complete -c dynamo -f -a '(__dynamo_complete)'
""",
}
Values = Callable[[str, str], Iterable[str]]
"""The values of a kind (files, graphs, services, models, namespaces) for the text so far."""
_KINDS = {
    "graph": "graphs",
    "namespace": "namespaces",
    "service": "services",
    "name": "services",
    "model": "models",
}
_OTHER_KINDS = {
    ("run", "model"): "files",  # it is not served yet
    ("init", "model"): "files",
    ("key", "name"): "",  # a new one
    ("install-service", "name"): "",
}
_FILE_ENDS = ("_file", "_path", "_dir", "write", "trace", "output", "directory")
_HELP = ("--help", "show the options")
_LAB = "dynamo_lab."


def subverbs(verb: str) -> tuple[str, ...]:
    """Return the words that may follow ``verb`` and have options of their own."""
    return tuple(SUBVERBS.get(verb, ()))


def verb_groups(verb: str, subverb: str = "") -> tuple[type[Any], ...]:
    """Return the groups of ``dynamo verb``, or of ``dynamo verb subverb`` if it has that one.

    Imports only those: a group takes a millisecond.
    """
    names = SUBVERBS.get(verb, {}).get(subverb, VERBS[verb].options)
    if names is None:
        return settings_groups(f"dynamo.{verb}")
    try:
        return tuple(map(_group, names.split()))
    except ModuleNotFoundError as error:
        if error.name != "dynamo_lab":
            raise
        return ()  # the verb says how to install it


def _group(path: str) -> type[Any]:
    module, _, name = path.rpartition(".")
    module = module if module.startswith(_LAB) else f"dynamo.{module or 'cli.options'}"
    name = f"{name}Settings"
    group: type[Any] = getattr(importlib.import_module(module), name)
    return group


@dataclass(frozen=True)
class Completion:
    """A word that can follow, and what it means."""

    word: str
    text: str = ""


@dataclass(frozen=True)
class VerbOptions:
    """The options of a verb: by flag, and its words without a flag, in order."""

    flags: Mapping[str, Field[Any]]
    words: tuple[Field[Any], ...]
    subverbs: tuple[str, ...] = ()


def candidates(words: Sequence[str], current: str, values: Values) -> Iterator[Completion]:
    """Yield what can replace ``current``, which follows ``words`` (without ``dynamo`` itself)."""
    for completion in _all(list(words), current, values):
        if completion.word.startswith(current):
            yield completion


def _all(words: list[str], current: str, values: Values) -> Iterator[Completion]:
    if not words:
        yield from (Completion(verb, text) for verb, (_, text, _) in VERBS.items())
        yield Completion(*_HELP)
        return
    verb = words.pop(0)
    # Words after -- go to the engine.
    if verb not in VERBS or "--" in words:
        return
    options = verb_options(verb, words[0] if words else "")
    if options.subverbs and not words:
        yield from (Completion(word) for word in options.subverbs)
    flag, joined, text = current.partition("=")
    if joined and flag in options.flags:
        for value in _values_of(verb, options.flags[flag], text, values):
            yield Completion(f"{flag}={value.word}", value.text)
    elif words and _takes_value(options.flags.get(words[-1])):
        yield from _values_of(verb, options.flags[words[-1]], current, values)
    elif current.startswith("-"):
        yield from _flags(options)
        graph = next((word for word in words if word.endswith((".yaml", ".yml"))), "")
        yield from (Completion(word) for word in values(f"overrides:{graph}", current))
    else:
        position = _position(words, options)
        if position < len(options.words):
            yield from _values_of(verb, options.words[position], current, values)


def verb_options(verb: str, subverb: str = "") -> VerbOptions:
    """Return the options of ``dynamo verb``, or of ``dynamo verb subverb`` if it has that one."""
    groups = verb_groups(verb, subverb)
    flags: dict[str, Field[Any]] = {}
    words: list[Field[Any]] = []
    for field in (field for group in groups for field in fields_of(group)):
        spec = option_of(field)
        if spec.flags and not spec.flags[0].startswith("-"):
            words.append(field)
        for flag in spec.flags:
            if flag.startswith("-"):
                flags[flag] = field
                if is_switch(field) and not flag.startswith("--no-"):
                    flags[f"--no-{flag[2:]}"] = field
    return VerbOptions(flags, tuple(words), subverbs(verb))


def _flags(options: VerbOptions) -> Iterator[Completion]:
    for flag, field in options.flags.items():
        spec = option_of(field)
        # The negation of a switch is accepted, but not offered.
        if not spec.deprecated and not (flag.startswith("--no-") and flag not in spec.flags):
            yield Completion(flag, spec.help)
    yield Completion(*_HELP)


def _position(words: Sequence[str], options: VerbOptions) -> int:
    """Return how many words without a flag ``words`` has."""
    count, is_value = 0, False
    for word in words:
        if not is_value and not word.startswith("-"):
            count += 1
        is_value = not is_value and _takes_value(options.flags.get(word))
    return count - (bool(options.subverbs) and bool(words) and words[0] in options.subverbs)


def _values_of(verb: str, field: Field[Any], text: str, values: Values) -> Iterator[Completion]:
    spec = option_of(field)
    if spec.choices:
        yield from map(Completion, spec.choices)
        return
    kind = _KINDS.get(field.name) or ("files" if field.name.endswith(_FILE_ENDS) else "")
    kind = _OTHER_KINDS.get((verb, field.name), kind)
    if kind:
        yield from map(Completion, values(kind, text))


def _takes_value(field: Field[Any] | None) -> bool:
    return field is not None and not is_switch(field)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the script of a shell; return the exit status."""
    (settings,) = load("dynamo completion", DESCRIPTION, [CompletionSettings], argv, epilog=EPILOG)
    shell = settings.shell or Path(environ().get("SHELL", "")).name
    if shell not in _SCRIPTS:
        print(
            f"dynamo completion: no shell given; try: dynamo completion {'|'.join(_SCRIPTS)}",
            file=sys.stderr,
        )
        return 2
    print(_SCRIPTS[shell].strip("\n"))
    return 0


def answer(argv: Sequence[str]) -> int:
    """Print what can follow: the words of ``argv`` are the shell, then the words so far.

    bash sends its command line as one word instead, because it splits words at ``=`` and ``:``.
    """
    shell, *words = argv
    if shell == "bash":
        words = _split(words[0])[1:]
    *before, current = words or [""]
    values = _Values(before)
    completions = list(candidates(before, current, values))
    if shell == "bash":
        # bash replaces only what follows the last of its word breaks.
        cut = max(current.rfind("="), current.rfind(":")) + 1
        words = [completion.word[cut:] for completion in completions]
        lines = [_FILES if values.are_files else _WORDS, *words]
    else:
        lines = [_line(completion) for completion in completions]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _line(completion: Completion) -> str:
    text = completion.text.partition(";")[0][:_TEXT_WIDTH]
    return f"{completion.word}\t{text}" if text else completion.word


def _split(line: str) -> list[str]:
    """Return the words of an unfinished command line; the last one is being typed."""
    for end in ("", "'", '"'):
        try:
            words = shlex.split(line + end)
        except ValueError:
            continue  # an open quote, or a backslash at the end
        return [*words, ""] if not end and (not line or line[-1].isspace()) else words
    return line.split(" ")


class _Values:
    """The values of each kind. ``are_files`` after a call that returned paths."""

    def __init__(self, words: Sequence[str]) -> None:
        self.are_files = False
        pairs = itertools.pairwise(words)
        self._namespace = next((value for flag, value in pairs if flag == "--namespace"), None)

    def __call__(self, kind: str, text: str) -> Iterator[str]:
        """Yield the values of ``kind`` that may begin with ``text``."""
        kind, _, graph = kind.partition(":")
        if kind == "overrides":
            yield from _overrides(graph, text)
        elif kind in (_FILES, "graphs"):
            self.are_files = True
            yield from _paths(text, (".yaml", ".yml") if kind == "graphs" else ())
        elif kind == "namespaces":
            with contextlib.suppress(ConfigError):  # there is no home directory
                directory = state_path(from_env(RuntimeSettings))
                yield from sorted(path.stem for path in directory.glob("[!.]*.json"))
        elif kind == "services":
            entries = self._document().components.values()
            names = {entry.service for entry in entries} | {entry.name for entry in entries}
            yield from sorted(names)
        elif kind == "models":
            services = self._document().services.values()
            yield from sorted({facts.model for facts in services} - {""})

    def _document(self) -> Document:
        document = None
        with contextlib.suppress(ConfigError, StatefileError):  # several deployments, or damaged
            runtime = chosen_runtime(self._namespace)
            document = Statefile(state_path(runtime), runtime.namespace).read()
        return document or Document()


def _paths(text: str, endings: tuple[str, ...]) -> Iterator[str]:
    """Yield directories and files, of ``endings`` only if given, that begin with ``text``."""
    head, slash, tail = text.rpartition("/")
    try:
        listed = sorted(expanded(head + slash or ".").iterdir())
    except OSError:
        return
    for path in listed:
        if path.name.startswith(".") and not tail.startswith("."):
            continue
        if path.is_dir():
            yield f"{head}{slash}{path.name}/"
        elif not endings or path.name.endswith(endings):
            yield f"{head}{slash}{path.name}"


def _overrides(graph: str, text: str) -> Iterator[str]:
    """Yield ``--Service.key=`` for the services of the file ``graph``."""
    # Names of services begin with a capital: no other flag needs the file.
    if not graph or not text.startswith("--") or (text[2:3] and not text[2].isupper()):
        return
    import yaml  # takes 20 ms

    try:
        document = yaml.safe_load(expanded(graph).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return
    for name, service in document.items() if isinstance(document, dict) else ():
        if isinstance(service, dict) and "run" in service:
            groups = settings_groups(service["run"]) if isinstance(service["run"], str) else ()
            keys = [
                flag[2:]
                for group in groups
                for field in fields_of(group)
                for flag in option_of(field).flags[:1]
            ]
            yield from (f"--{name}.{key}=" for key in (*_SERVICE_ARGS, *keys))
