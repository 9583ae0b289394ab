"""The systemd unit of a deployment. Pure.

Hardening stops where it would take GPUs, models or just-in-time compilers away: PrivateDevices and
ProtectClock hide /dev/nvidia*, MemoryDenyWriteExecute breaks compilers, ProtectHome hides models
and caches, PrivateTmp hides sockets from `dynamo ps`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

HEADER = "# Written by dynamo install-service. Changes belong into: systemctl edit"
"""First line of each unit of ours, which may be replaced."""

_EXIT_S = 30
_FILES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SystemdUnit:
    """The unit of ``dynamo serve``.

    ``command`` starts dynamo, ``graph`` and ``directory`` are absolute. ``stop_s`` is how long a
    stop may drain. ``user`` runs it; None for a unit of the user's own manager. ``state_name``
    is a directory below /var/lib for a user without a home directory. ``gpu_setup`` is the command
    that makes the GPUs' device files, as root.
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
        rows.append(("EnvironmentFile", f"-%E/dynamo/{self.name}.env"))
        if self.gpu_setup and self.user:
            rows.append(("# NoNewPrivileges keeps CUDA from making the device files itself.", ""))
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
    return " ".join(_word(word.replace("$", "$$")) for word in words)


def _word(text: str) -> str:
    """Return ``text`` as one word of a setting."""
    escaped = _escaped(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"' if not escaped or set(escaped) & set(" \t\"'\\;") else escaped


def _escaped(text: str) -> str:
    """Return ``text`` with its percent signs doubled: a single one begins a specifier."""
    return text.replace("%", "%%")
