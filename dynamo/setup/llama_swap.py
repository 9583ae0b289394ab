"""Converts a configuration of llama-swap to a graph: facts of its documentation, no code. Pure.

Its models become services of ``dynamo.attach``, which start their commands on request. What has no
counterpart is listed with the reason.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, count
from typing import Any
from urllib.parse import urlsplit

import yaml

from dynamo.config.programs import ATTACH, FRONTEND, PLANNER
from dynamo.errors import ConfigError
from dynamo.serve.graph.graph import MAX_EXPANDED_CHARS, parse_yaml
from dynamo.serve.graph.service import PROTECTED

_MACRO = re.compile(r"\$\{([A-Za-z0-9_.-]+)\}")
_PROFILES = {"llama-server": "llama.cpp", "vllm": "vllm", "sglang": "sglang", "ollama": "ollama"}
_OWN = ("PORT", "PID")
_MACRO_DEPTH = 20
_INHERITED = "\0"
"""The value of a variable that is inherited; no value of an environment has this character."""
_SECRET_FLAG = re.compile(
    r"(?<![\w-])--[\w-]*(api-?key|auth-?token|hf-?token|secret|passw)", re.IGNORECASE
)
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_WIDE = 10_000
_TAKEN = ("Frontend", "Planner", "Common", "namespace")
_LEFT_OUT = {
    "logLevel": "the level of logs is DYN_LOG",
    "logTimeFormat": "log lines have the time of DYN_LOG",
    "logToStdout": "dynamo logs shows the output of each model",
    "metricsMaxInMemory": "dynamo explain has the last 1,000 requests",
    "captureBuffer": "dynamo record writes requests to a file",
    "startPort": "each server gets a free port",
    "apiKeys": "keys are in a file: dynamo key add, and api-key-file of the Frontend",
    "matrix": "its sets are not read; all models take turns",
    "peers": "a server elsewhere is a service of its own: run: dynamo.attach with url",
}
"""Keys of the file without a counterpart in a graph, and what to use."""
_MODEL_LEFT_OUT = {
    "name": "/v1/models has ids alone",
    "description": "/v1/models has ids alone",
    "metadata": "/v1/models has ids alone",
    "cmdStop": "the command and all its children get SIGTERM, then SIGKILL",
    "checkEndpoint": "a server is ready when it lists its models",
    "setParamsByID": "an alias has the fields of its model; give it a service of its own",
}
_READ = ("models", "groups", "hooks", "macros", "globalTTL", "healthCheckTimeout")
_READ_OF_MODEL = (
    *("cmd", "macros", "env", "proxy", "ttl", "useModelName", "filters", "aliases", "unlisted"),
    *("concurrencyLimit", "sendLoadingState", "timeouts"),
)


@dataclass(frozen=True)
class Converted:
    """The YAML of the graph, and a line for each thing that it does not have.

    ``has_secrets``: it has keys, or values of the environment, which may be secrets.
    """

    text: str
    left_out: Sequence[str]
    has_secrets: bool = False


def convert(text: str, source: str, env: Mapping[str, str], listen: Mapping[str, Any]) -> Converted:
    """Convert the configuration ``text``. Raises ConfigError.

    ``env`` are the variables that it may name, ``listen`` has ``namespace``, ``http-host`` and
    ``http-port`` of the graph.
    """
    return _Converter(parse_yaml(text, source).values, source, env).graph(listen)


@dataclass
class _Converter:
    values: Mapping[str, Any]
    source: str
    env: Mapping[str, str]
    left_out: list[str] = field(default_factory=list)
    expanded_chars: int = 0
    has_secrets: bool = False

    def graph(self, listen: Mapping[str, Any]) -> Converted:
        models = self._mapping(self.values, "models")
        if not models:
            raise ConfigError(f"{self.source}: it has no models; is it a file of llama-swap?")
        for key in self.values:
            if key in _LEFT_OUT:
                self.left_out.append(f"{key}: {_LEFT_OUT[key]}")
            elif key not in (*_READ, "sendLoadingState", "includeAliasesInList"):
                self.left_out.append(f"{key}: not known")
        services: dict[str, dict[str, Any]] = {}
        names: dict[str, str] = {}
        for model in models:
            keys = self._mapping(models, model)
            service = self._service(model, keys)
            if service is not None:
                names[model] = _service_name(model, services)
                services[names[model]] = service
        if not services:
            raise ConfigError(f"{self.source}: no model can be converted: {self.left_out[-1]}")
        preloaded = self._preload(models)
        for model, groups in _cliques(names, self._conflicts(names)).items():
            services[names[model]]["ServiceArgs"]["group"] = groups
        self._start(services, names, preloaded)
        head = {"namespace": listen["namespace"]}
        frontend = {
            "run": FRONTEND,
            "http-host": listen["http-host"],
            "http-port": listen["http-port"],
        }
        planner = {"run": PLANNER, "mode": "auto", "max-gpu-budget": max(8, len(services))}
        document = {**head, "Frontend": frontend, "Planner": planner, **services}
        text: str = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=_WIDE)
        return Converted(
            re.sub(r"^(?=[A-Z])", "\n", text, flags=re.MULTILINE), self.left_out, self.has_secrets
        )

    def _service(self, model: str, keys: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the service of ``model``; None if it cannot be one."""
        for key, value in keys.items():
            if value and key in _MODEL_LEFT_OUT:
                self.left_out.append(f"{model}.{key}: {_MODEL_LEFT_OUT[key]}")
            elif key not in _READ_OF_MODEL and key not in _MODEL_LEFT_OUT:
                self.left_out.append(f"{model}.{key}: not known")
        keys = self._expanded(model, {k: v for k, v in keys.items() if k in _READ_OF_MODEL})
        if "," in model or "=" in model:
            self.left_out.append(f"{model}: a name cannot have ',' or '='")
            return None
        upstream = keys.get("useModelName")
        service: dict[str, Any] = {"run": ATTACH}
        command = _command(str(keys.get("cmd") or ""))
        if not command:
            self.left_out.append(f"{model}: it has no cmd")
            return None
        words = {word.rpartition("/")[2] for word in command.split()}
        profile = next((_PROFILES[word] for word in _PROFILES if word in words), None)
        if profile is not None:
            service["profile"] = profile
        self.has_secrets |= _SECRET_FLAG.search(command) is not None
        service["exec"] = command.replace("${PORT}", "{port}")
        if "${PORT}" not in command:
            if not keys.get("proxy"):
                self.left_out.append(f"{model}: its cmd has no ${{PORT}}, and it has no proxy")
                return None
            service["url"] = str(keys["proxy"]).rstrip("/")
        elif path := urlsplit(str(keys.get("proxy") or "")).path.rstrip("/"):
            self.left_out.append(f"{model}.proxy: its path {path}: the server is asked at /v1")
        service["served-model-name"] = f"{model}={upstream}" if upstream else model
        service |= self._limits(keys)
        service["ServiceArgs"] = self._args(model, keys)
        return service

    def _limits(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        limits = {
            "startup-timeout-secs": self.values.get("healthCheckTimeout"),
            "engine-request-limit": keys.get("concurrencyLimit"),
            "connect-timeout-secs": self._mapping(keys, "timeouts").get("connect"),
            "response-timeout-secs": self._mapping(keys, "timeouts").get("responseHeader"),
        }
        return {key: value for key, value in limits.items() if value}

    def _args(self, model: str, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``ServiceArgs`` of a model, without its groups."""
        ttl = keys.get("ttl", -1)
        # -1 is llama-swap's default: the value for all models counts.
        ttl = self.values.get("globalTTL", 0) if ttl in (None, -1) else ttl
        args: dict[str, Any] = {"workers": 0, "idle_timeout": f"{ttl}s" if ttl else "never"}
        filters = self._mapping(keys, "filters")
        self._filters(model, filters, args)
        aliases = [
            alias if isinstance(alias, dict) else {"id": alias}
            for alias in self._list(keys, "aliases")
        ]
        if aliases:
            args["aliases"] = [str(alias.get("id")) for alias in aliases]
        lists_aliases = bool(self.values.get("includeAliasesInList"))
        is_listed = [not alias.get("unlisted", not lists_aliases) for alias in aliases]
        if keys.get("unlisted"):
            args["hidden"] = True
        elif aliases and not all(is_listed):
            args["hidden"] = "aliases"
            if any(is_listed):
                self.left_out.append(f"{model}.aliases: all are hidden, or none; these are hidden")
        if keys.get("sendLoadingState", self.values.get("sendLoadingState")):
            args["show_loading"] = True
        if envs := self._envs(model, self._list(keys, "env")):
            args["envs"] = envs
        return args

    def _envs(self, model: str, variables: Sequence[Any]) -> dict[str, str]:
        """Return the variables of a model, without those that it inherits anyway."""
        envs = {}
        for name, _, value in (str(variable).partition("=") for variable in variables):
            if any(f"${{{own}}}" in value for own in _OWN):
                text = "it is chosen at each start; only cmd may name it, as ${PORT}"
                self.left_out.append(f"{model}.env: {name}={value}: {text}")
            elif value == _INHERITED:
                self.left_out.append(
                    f"{model}.env: {name}: taken from the environment of dynamo serve: set it there"
                )
            else:
                envs[name] = value
                self.has_secrets |= _SECRET.search(name) is not None
        return envs

    def _filters(self, model: str, filters: Mapping[str, Any], args: dict[str, Any]) -> None:
        stripped = str(filters.get("stripParams") or filters.get("strip_params") or "")
        forced = self._mapping(filters, "setParams")
        names = [name for part in stripped.split(",") if (name := part.strip())]
        kept = [name for name in (*names, *forced) if name in PROTECTED]
        for name in set(kept) - {"model"}:
            self.left_out.append(f"{model}.filters: {name} is the client's")
        forbid = [name for name in dict.fromkeys((*names, *forced)) if name not in kept]
        if forbid:
            args["forbid"] = forbid
        if defaults := {name: value for name, value in forced.items() if name not in kept}:
            args["defaults"] = defaults
        if filters.get("setParamsByID"):
            text = _MODEL_LEFT_OUT["setParamsByID"]
            self.left_out.append(f"{model}.filters.setParamsByID: {text}")

    def _preload(self, models: Mapping[str, Any]) -> list[str]:
        start = self._mapping(self._mapping(self.values, "hooks"), "on_startup")
        wanted = [str(name) for name in self._list(start, "preload")]
        for name in wanted:
            if name not in models:
                self.left_out.append(f"hooks.on_startup.preload: no model {name}")
        return [name for name in wanted if name in models]

    def _start(
        self,
        services: Mapping[str, dict[str, Any]],
        names: Mapping[str, str],
        preloaded: Sequence[str],
    ) -> None:
        """Let the ``preloaded`` models start with the deployment, as far as groups allow it."""
        awake: set[str] = set()
        for model in preloaded:
            args = services[names[model]]["ServiceArgs"] if model in names else None
            if args is None:
                continue
            groups = set(args.get("group", ()))
            if groups & awake:
                self.left_out.append(
                    f"hooks.on_startup.preload: {model} takes turns with a model before it"
                )
                continue
            awake |= groups
            args["workers"] = 1

    def _conflicts(self, models: Collection[str]) -> set[frozenset[str]]:
        """Return the pairs of models that may not be awake together."""
        if "matrix" in self.values:
            return {frozenset(pair) for pair in combinations(models, 2)}
        groups: dict[str, _Group] = {}
        for name in (tables := self._mapping(self.values, "groups")):
            keys = self._mapping(tables, name)
            members = [str(member) for member in self._list(keys, "members")]
            groups[name] = _Group(
                members=[member for member in members if member in models],
                swap=keys.get("swap") is not False,
                exclusive=keys.get("exclusive") is not False,
                persistent=bool(keys.get("persistent")),
            )
            for member in members:
                if member not in models:
                    self.left_out.append(f"groups.{name}.members: no model {member}")
        grouped = {member for group in groups.values() for member in group.members}
        groups["(default)"] = _Group([model for model in models if model not in grouped])
        pairs = {
            frozenset(pair)
            for group in groups.values()
            if group.swap
            for pair in combinations(group.members, 2)
        }
        for (first, left), (second, right) in combinations(groups.items(), 2):
            ways = left.ends(right), right.ends(left)
            if not any(ways) or not left.members or not right.members:
                continue
            if not all(ways):
                self.left_out.append(
                    f"groups: {first} and {second} take turns; in llama-swap only a load of one of "
                    "them ends models of the other"
                )
            pairs |= {frozenset((a, b)) for a in left.members for b in right.members}
        return pairs

    def _expanded(self, model: str, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``keys`` with their macros replaced; ``${PORT}`` stays."""
        macros: dict[str, Any] = {"MODEL_ID": model}
        for table in (self.values, keys):
            macros |= self._mapping(table, "macros")
        keys = {**keys, "env": [_inherited(variable) for variable in self._list(keys, "env")]}
        return {
            key: self._replaced(value, macros, f"{model}.{key}")
            for key, value in keys.items()
            if key != "macros"
        }

    def _replaced(self, value: Any, macros: Mapping[str, Any], where: str, depth: int = 0) -> Any:
        if depth > _MACRO_DEPTH:
            raise ConfigError(f"{self.source}: {where}: a macro contains itself")
        # Each use of a macro counts, as each use of an alias does: macros of macros multiply.
        self.expanded_chars += 1 + len(value) if isinstance(value, str) else 1
        if self.expanded_chars > MAX_EXPANDED_CHARS:
            raise ConfigError(
                f"{self.source}: {where}: with all macros expanded, the file is larger than "
                f"{MAX_EXPANDED_CHARS:,} characters"
            )
        if isinstance(value, dict):
            return {key: self._replaced(item, macros, where, depth) for key, item in value.items()}
        if isinstance(value, list):
            return [self._replaced(item, macros, where, depth) for item in value]
        if not isinstance(value, str):
            return value
        whole = _MACRO.fullmatch(value)
        if whole is not None and whole[1] in macros:  # a number stays one
            return self._replaced(macros[whole[1]], macros, where, depth + 1)

        return _MACRO.sub(lambda match: self._word(match, macros, where, depth), value)

    def _word(self, match: re.Match[str], macros: Mapping[str, Any], where: str, depth: int) -> str:
        """Return the text for one ``${name}``. Raises ConfigError."""
        name = match[1]
        if name in _OWN:
            return match[0]
        if name.startswith("env."):
            if name[4:] not in self.env:
                raise ConfigError(f"{self.source}: {where}: no variable {name[4:]} is set")
            self.has_secrets = True
            return self.env[name[4:]]
        if name not in macros:
            raise ConfigError(f"{self.source}: {where}: no macro {name}")
        return str(self._replaced(macros[name], macros, where, depth + 1))

    def _mapping(self, values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        value = values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ConfigError(f"{self.source}: {key} must be a mapping, got {value!r}")
        return value

    def _list(self, values: Mapping[str, Any], key: str) -> Sequence[Any]:
        value = values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise ConfigError(f"{self.source}: {key} must be a list, got {value!r}")
        return value


@dataclass(frozen=True)
class _Group:
    """``swap``: one member at a time; ``exclusive``: a load ends models of other groups;
    ``persistent``: other groups do not end its models."""

    members: Sequence[str]
    swap: bool = True
    exclusive: bool = True
    persistent: bool = False

    def ends(self, other: _Group) -> bool:
        """Whether a load of a member ends models of ``other``."""
        return self.exclusive and not other.persistent


def _inherited(variable: Any) -> Any:
    """Mark ``X=${env.X}``: a server has the variables of ``dynamo serve``, so none is written."""
    name = str(variable).partition("=")[0]
    return f"{name}={_INHERITED}" if variable == f"{name}=${{env.{name}}}" else variable


def _cliques(models: Collection[str], pairs: Collection[frozenset[str]]) -> dict[str, list[str]]:
    """Return groups for each model, so that exactly the ``pairs`` have one in common."""
    groups: dict[str, list[str]] = {}
    left = set(pairs)
    for number, clique in enumerate(_covering(list(models), pairs, left), 1):
        for model in clique:
            groups.setdefault(model, []).append(f"turns{number}")
    return groups


def _covering(
    models: Sequence[str], pairs: Collection[frozenset[str]], left: set[frozenset[str]]
) -> Iterator[list[str]]:
    for first, second in combinations(models, 2):
        if frozenset((first, second)) not in left:
            continue
        clique = [first, second]
        for model in models:
            if model not in clique and all(
                frozenset((model, member)) in pairs for member in clique
            ):
                clique.append(model)
        # All its pairs are covered: a pair that is left begins the next clique.
        left -= {frozenset(pair) for pair in combinations(clique, 2)}
        yield clique


def _command(text: str) -> str:
    """Return a command of several lines, with comments, as one line. Raises ConfigError."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = " ".join(line.rstrip().removesuffix("\\") for line in lines)
    try:
        words = shlex.split(joined)
    except ValueError as error:
        raise ConfigError(f"cmd {joined!r}: {error}") from None
    return " ".join(_quoted(word) for word in words)


def _quoted(word: str) -> str:
    """Return ``word`` as a shell takes it; ``${PORT}`` alone needs no quotes, for people."""
    quoted = shlex.quote(word)
    without = word.replace("${PORT}", "0")
    return word if shlex.quote(without) == without else quoted


def _service_name(model: str, taken: Collection[str]) -> str:
    words = re.findall(r"[A-Za-z0-9]+", model)
    name = "".join(word[:1].upper() + word[1:] for word in words)[:40] or "Model"
    name = name if name[0].isalpha() else f"Model{name}"
    lower = {candidate.lower() for candidate in (*taken, *_TAKEN)}
    return next(candidate for candidate in _numbered(name) if candidate.lower() not in lower)


def _numbered(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}_{number}" for number in count(2))
