"""``dynamo completion bash|zsh|fish``: a script that completes commands of ``dynamo`` by Tab.

The script asks the hidden verb ``__complete`` at each Tab, so it needs no update. An answer takes
less than 0.1 s: nothing here imports more than the options and one YAML file.
"""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo.box.deployments import chosen_runtime
from dynamo.cli.completion_words import Completion, Verbs, candidates
from dynamo.config import environ, from_env, load
from dynamo.config.completion import CompletionSettings
from dynamo.config.modules import settings_groups
from dynamo.config.option import fields_of
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError

__all__ = ["COMPLETE", "answer", "main"]

DESCRIPTION = "Print a script for your shell: it completes verbs, options, services and files."
EPILOG = """install it once:
  bash  dynamo completion bash > ~/.local/share/bash-completion/completions/dynamo
  zsh   dynamo completion zsh > ~/.zfunc/_dynamo     with fpath+=~/.zfunc before compinit
  fish  dynamo completion fish > ~/.config/fish/completions/dynamo.fish
or for this shell alone: eval "$(dynamo completion bash)" """

COMPLETE = "__complete"
"""The hidden verb: the shell, and the command line so far."""

_TEXT_WIDTH = 70
_FILES = "files"
_WORDS = "words"
_MODEL_FLAGS = ("--served-model-name", "--model-name", "--model", "--model-path")
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


def answer(verbs: Verbs, argv: Sequence[str]) -> int:
    """Print what can follow: the words of ``argv`` are the shell, then the words so far.

    bash sends its command line as one word instead, because it splits words at ``=`` and ``:``.
    """
    shell, *words = argv
    if shell == "bash":
        words = _split(words[0])[1:]
    *before, current = words or [""]
    values = _Values(before)
    found = list(candidates(verbs, before, current, values))
    if shell == "bash":
        cut = max(current.rfind("="), current.rfind(":")) + 1
        lines = [_FILES if values.are_files else _WORDS, *(one.word[cut:] for one in found)]
    else:
        lines = [_line(one) for one in found]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _line(one: Completion) -> str:
    text = one.text.partition(";")[0][:_TEXT_WIDTH]
    return f"{one.word}\t{text}" if text else one.word


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
        given = [b for a, b in itertools.pairwise(words) if a == "--namespace"]
        self._namespace = given[0] if given else None

    def __call__(self, kind: str, text: str) -> Iterator[str]:
        """Yield the values of ``kind`` that may begin with ``text``."""
        kind, _, graph = kind.partition(":")
        if kind == "overrides":
            yield from _overrides(graph, text)
        elif kind in (_FILES, "graphs"):
            self.are_files = True
            yield from _paths(text, (".yaml", ".yml") if kind == "graphs" else ())
        elif kind == "namespaces":
            yield from sorted(path.stem for path in _state_dir().glob("[!.]*.json"))
        elif kind == "services":
            components = self._components()
            services = {str(entry.get("service")) for entry in components.values()}
            yield from sorted(services | components.keys())
        elif kind == "models":
            yield from sorted({*map(_model, self._components().values())} - {""})

    def _components(self) -> Mapping[str, Any]:
        try:
            namespace = chosen_runtime(self._namespace).namespace
            document = json.loads((_state_dir() / f"{namespace}.json").read_bytes())
            components: Mapping[str, Any] = document["components"]
        except (ConfigError, OSError, ValueError, KeyError):
            return {}  # nothing runs, or several deployments
        return components


def _state_dir() -> Path:
    given = from_env(RuntimeSettings).state_dir
    return Path(given or "~/.dynamo/state").expanduser()


def _model(entry: Mapping[str, Any]) -> str:
    """Return the name of a worker's model, from its command line."""
    argv = entry.get("argv") or []
    for flag in _MODEL_FLAGS:
        if flag in argv[:-1]:
            name = str(argv[argv.index(flag) + 1])
            return Path(name).name if name.startswith("/") else name
    return ""


def _paths(text: str, endings: tuple[str, ...]) -> Iterator[str]:
    """Yield directories and files, of ``endings`` only if given, that begin with ``text``."""
    head, slash, tail = text.rpartition("/")
    try:
        listed = sorted(Path(head + slash or ".").expanduser().iterdir())
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
    if not graph or not text.startswith("--") or (text[2:3] and not text[2].isupper()):
        return
    import yaml  # takes 20 ms

    try:
        document = yaml.safe_load(Path(graph).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return
    for name, service in document.items() if isinstance(document, dict) else ():
        if isinstance(service, dict) and "run" in service:
            groups = settings_groups(service["run"]) if isinstance(service["run"], str) else None
            keys = [
                flag[2:]
                for group in groups or ()
                for field in fields_of(group)
                for flag in field.metadata["option"].flags[:1]
            ]
            yield from (f"--{name}.{key}=" for key in (*_SERVICE_ARGS, *keys))
