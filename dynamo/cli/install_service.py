"""``dynamo install-service``: write a systemd unit for a graph."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dynamo.cli.options import InstallServiceSettings
from dynamo.config import environ, from_env, load
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.serve import ServeSettings
from dynamo.errors import ConfigError, DynamoError
from dynamo.runtime.process.paths import expanded, write_atomic
from dynamo.serve.graph.watchers import WatcherSpec
from dynamo.setup.graph_plan import prepare, read_graph

HEADER = "# Written by dynamo install-service. Changes belong into: systemctl edit"
"""First line of each unit of ours, which may be replaced."""

_DEFAULT_NAME = "dynamo"
# For dynamo serve to kill what has not drained, before systemd kills all of it.
_EXIT_S = 30
_FILES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SystemdUnit:
    """The unit of ``dynamo serve``.

    ``command`` starts dynamo, ``graph`` and ``directory`` are absolute. ``stop_s`` is how long a
    stop may drain. ``user`` runs it; None for a unit of the user's own manager. ``state_name``
    is a directory below /var/lib for a user without a home directory. ``gpu_setup`` is the command
    that makes the GPUs' device files, as root.

    Hardening stops where it would take GPUs, models or just-in-time compilers away: PrivateDevices
    and ProtectClock hide /dev/nvidia*, MemoryDenyWriteExecute breaks compilers, ProtectHome hides
    models and caches, PrivateTmp hides sockets from `dynamo ps`.
    """

    name: str
    command: tuple[str, ...]
    graph: str
    directory: str
    stop_s: float
    user: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    state_name: str | None = None
    gpu_setup: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the content of the unit file."""
        sections = {
            "Unit": self._unit(),
            "Service": [*self._process(), *self._limits(), *self._hardening()],
            "Install": [("WantedBy", "multi-user.target" if self.user else "default.target")],
        }
        lines = [HEADER]
        for title, rows in sections.items():
            lines += ["", f"[{title}]"]
            lines += [key if not value else f"{key}={value}" for key, value in rows]
        return "\n".join(lines) + "\n"

    def _unit(self) -> list[tuple[str, str]]:
        rows = [("Description", f"LLM serving with dynamo: {_escaped(self.graph)}")]
        if self.user:
            rows += [
                ("Wants", "network-online.target"),
                ("After", "network-online.target nvidia-persistenced.service"),
            ]
        return [*rows, ("StartLimitIntervalSec", "300"), ("StartLimitBurst", "5")]

    def _process(self) -> list[tuple[str, str]]:
        rows = [("Type", "exec")]
        if self.user:
            rows.append(("User", self.user))
        if self.state_name:
            rows += [("StateDirectory", self.state_name), ("StateDirectoryMode", "0700")]
        rows.append(("WorkingDirectory", _escaped(self.directory)))
        rows += [("Environment", _word(f"{key}={value}")) for key, value in self.env.items()]
        rows.append(("# HF_TOKEN and other secrets, mode 0600:", ""))
        # "-": it may be missing. %E is /etc, and ~/.config in a unit of the user's manager.
        rows.append(("EnvironmentFile", f"-%E/dynamo/{self.name}.env"))
        if self.gpu_setup and self.user:
            rows.append(("# NoNewPrivileges keeps CUDA from making the device files itself.", ""))
            # "+" runs it as root whatever User says, "-" starts the service even if it fails.
            rows.append(("ExecStartPre", f"-+{_command(self.gpu_setup)}"))
        return [
            *rows,
            ("ExecStart", _command((*self.command, "serve", self.graph))),
            ("ExecReload", _command((*self.command, "reload", self.graph))),
            ("# SIGTERM to dynamo serve alone, which drains; SIGKILL to what is left.", ""),
            ("KillMode", "mixed"),
            ("TimeoutStopSec", f"{int(self.stop_s) + _EXIT_S}"),
            ("Restart", "on-failure"),
            ("RestartSec", "5"),
            ("# 2: the graph or a flag is wrong.", ""),
            ("RestartPreventExitStatus", "2"),
        ]

    def _limits(self) -> list[tuple[str, str]]:
        return [
            ("LimitNOFILE", str(_FILES)),
            ("LimitMEMLOCK", "infinity"),
            ("TasksMax", "infinity"),
            ("# One worker without memory is restarted by dynamo, not the whole deployment.", ""),
            ("OOMPolicy", "continue"),
        ]

    def _hardening(self) -> list[tuple[str, str]]:
        rows = [("UMask", "0077")]
        if self.user:  # a user's own manager may not set the others
            names = (
                *("NoNewPrivileges", "ProtectKernelTunables", "ProtectKernelModules"),
                *("ProtectKernelLogs", "ProtectControlGroups", "ProtectHostname"),
                *("RestrictSUIDSGID", "RestrictRealtime", "LockPersonality"),
            )
            rows += [("ProtectSystem", "full"), *((name, "yes") for name in names)]
        return rows


def _command(words: Sequence[str]) -> str:
    # Commands are the only settings in which systemd replaces variables.
    return " ".join(_word(word.replace("$", "$$")) for word in words)


def _word(text: str) -> str:
    """Return ``text`` as one word of a setting."""
    escaped = _escaped(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"' if not escaped or set(escaped) & set(" \t\"'\\;") else escaped


def _escaped(text: str) -> str:
    """Return ``text`` with its percent signs doubled: a single one begins a specifier."""
    return text.replace("%", "%%")


DESCRIPTION = "Write a systemd unit that serves a graph, and say how to start it."
EPILOG = """A second call with the same arguments changes nothing. A unit that this command did not
write is never replaced.
  dynamo install-service graph.yaml --user
  sudo "$(command -v dynamo)" install-service /etc/dynamo/graph.yaml --run-as dynamo
Exit status: 0 written or unchanged, 1 it cannot be written, 2 the graph or a flag is wrong."""

_UNIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_ENTER = """graph="$1"; shift
for path; do [ -x "$path" ] || { printf %s "$path"; exit 1; }; done
[ -r "$graph" ] || { printf %s "$graph"; exit 1; }"""
"""A script that prints the first path which its user may not enter, run or read."""
_PASSED_ON = ("DYN_LOCAL_STATE_DIR", "DYN_NAMESPACE", "HF_HOME", "CUDA_VISIBLE_DEVICES")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status."""
    (settings,) = load(
        "dynamo install-service", DESCRIPTION, [InstallServiceSettings], argv, epilog=EPILOG
    )
    unit = _unit(settings)
    if settings.print_only:
        print(unit.text(), end="")
        return 0
    _check_access(unit)
    path = _directory(settings) / f"{unit.name}.service"
    if unit.name == _DEFAULT_NAME:
        _check_graph(path, unit)
    print(f"{_write(path, unit.text())} {path}")
    print(_next_steps(settings, unit))
    return 0


def _unit(settings: InstallServiceSettings) -> SystemdUnit:
    """Check the graph as `dynamo serve` does; return its unit. Raises ConfigError."""
    if not _UNIT_NAME.fullmatch(settings.name):
        raise ConfigError(f"--name must be letters, digits, '_', '-' or '.', got {settings.name!r}")
    path = Path(settings.graph).absolute()
    if not path.is_file() and settings.graph == "graph.yaml":
        raise ConfigError("no graph.yaml here; name a file, or write one: dynamo init")
    graph = read_graph(str(path), (), None)
    serve = from_env(ServeSettings, graceful_timeout_s=settings.graceful_timeout_s)
    planned = prepare(graph, serve, from_env(RuntimeSettings, namespace=graph.namespace))
    account = None if settings.user else _account(settings.run_as)
    has_home = account is None or Path(account.pw_dir).is_dir()
    has_gpus = any(spec.gpus for spec in planned.specs)
    modprobe = shutil.which("nvidia-modprobe") if has_gpus else None
    return SystemdUnit(
        name=settings.name,
        command=_dynamo(),
        graph=str(path),
        directory=str(path.parent),
        stop_s=_stop_s(planned.specs),
        user=None if account is None else account.pw_name,
        env=_env(settings.name, has_home),
        state_name=None if has_home else settings.name,
        gpu_setup=(modprobe, "-c=0", "-u") if modprobe else (),
    )


def _account(name: str | None) -> pwd.struct_passwd:
    """Return the user that runs the service: the one named, or who called sudo."""
    name = name or environ().get("SUDO_USER")
    try:
        return pwd.getpwnam(name) if name else pwd.getpwuid(os.getuid())
    except KeyError:
        raise ConfigError(
            f"--run-as: no user {name!r}; make it: sudo useradd --system {name}"
        ) from None


def _check_access(unit: SystemdUnit) -> None:
    """Reject a user without access to dynamo or the graph, if root asks. Raises ConfigError.

    systemd would only report status 203/EXEC.
    """
    if os.getuid() or unit.user in (None, "root"):
        return
    account = pwd.getpwnam(str(unit.user))
    programs = [Path(unit.command[0]), Path(sys.executable).resolve()]
    entered = [path for file in [*programs, Path(unit.graph)] for path in reversed(file.parents)]
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", _ENTER, "sh", unit.graph, *map(str, [*entered, *programs])],
            user=account.pw_uid,
            group=account.pw_gid,
            extra_groups=os.getgrouplist(account.pw_name, account.pw_gid),
            cwd="/",
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    except PermissionError:  # root without the right to become another user, as in some containers
        return
    if done.returncode:
        raise ConfigError(
            f"user {unit.user} may not enter, run or read {done.stdout}, which the service needs; "
            "open it to that user, move graph or installation, or choose another --run-as"
        )


def _dynamo() -> tuple[str, ...]:
    program = Path(sys.executable).with_name("dynamo")
    return (str(program),) if program.exists() else (sys.executable, "-m", "dynamo")


def _stop_s(specs: Sequence[WatcherSpec]) -> float:
    """Return how long a stop may take: the slowest process of each stage, one after another."""
    slowest: dict[int, float] = {}
    for spec in specs:
        slowest[spec.stop_stage] = max(slowest.get(spec.stop_stage, 0.0), spec.graceful_timeout_s)
    return sum(slowest.values())


def _env(name: str, has_home: bool) -> dict[str, str]:
    """Return the variables: a PATH with engines and compilers, state, and the cache of models."""
    variables = environ()
    directories = [str(Path(sys.executable).parent), *variables.get("PATH", "").split(os.pathsep)]
    directories = [path for path in directories if path.startswith("/") and Path(path).is_dir()]
    env = {"PATH": os.pathsep.join(dict.fromkeys(directories))}
    if not has_home:
        state = f"/var/lib/{name}"
        env |= {"DYN_LOCAL_STATE_DIR": state, "HF_HOME": f"{state}/huggingface"}
    return env | {key: variables[key] for key in _PASSED_ON if variables.get(key)}


def _directory(settings: InstallServiceSettings) -> Path:
    if settings.directory is not None:
        return Path(settings.directory).absolute()
    if not settings.user:
        return Path("/etc/systemd/system")
    base = environ().get("XDG_CONFIG_HOME") or "~/.config"
    return expanded(base) / "systemd/user"


def _check_graph(path: Path, unit: SystemdUnit) -> None:
    """Raise ConfigError if the unit of this name serves another graph."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return
    start = next((line for line in text.splitlines() if line.startswith("ExecStart=")), "")
    if text.startswith(HEADER.partition(".")[0]) and _command([unit.graph]) not in start:
        raise ConfigError(
            f"{path} serves another graph ({start.partition('=')[2]}); choose another --name, or "
            f"remove it: systemctl disable --now {unit.name}, then delete {path}"
        )


def _write(path: Path, text: str) -> str:
    """Write the unit unless it is there already; return what was done. Raises DynamoError."""
    before = path.read_text(encoding="utf-8") if path.exists() else None
    if before == text:
        return "unchanged:"
    if before is not None and not before.startswith(HEADER.partition(".")[0]):
        raise ConfigError(
            f"{path} was not written by this command; choose another --name, or remove it"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode(), mode=0o666)
        path.chmod(0o644)
    except OSError as error:
        words = shlex.join([*_dynamo(), *sys.argv[1:]])
        raise DynamoError(
            f"cannot write {path}: {error.strerror}; run: sudo {words}   or add --user, or --print"
        ) from None
    return "wrote" if before is None else "replaced"


def _next_steps(settings: InstallServiceSettings, unit: SystemdUnit) -> str:
    systemctl = "systemctl --user" if settings.user else "sudo systemctl"
    journal = "journalctl --user" if settings.user else "journalctl"
    lines = [
        "next:",
        f"  {systemctl} daemon-reload",
        f"  {systemctl} enable --now {unit.name}",
        f"  {journal} -u {unit.name} -f",
        f"  {systemctl} reload {unit.name}   # after a change of {unit.graph}",
    ]
    if settings.user:
        lines.insert(1, "  loginctl enable-linger   # so that it runs while you are logged out")
    if unit.user == "root":
        lines.append("it runs as root; --run-as USER chooses another user")
    if unit.state_name:
        state = unit.env["DYN_LOCAL_STATE_DIR"]
        lines.append(f"  sudo -u {unit.user} DYN_LOCAL_STATE_DIR={state} dynamo ps")
    return "\n".join(lines)
