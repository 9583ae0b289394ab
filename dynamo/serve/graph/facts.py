"""What a service is, and where a frontend listens: decided once, when a graph is planned. Pure.

The arbiter writes these facts into the statefile, and other programs read them there: they have
neither the variables of a process nor the directory in which a relative path of its command begins.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo.prometheus_names import name_prefix
from dynamo.protocols.records import Record
from dynamo.serve.graph.service import ModelArgs, model_args_of

PREFILL, DECODE = "prefill", "decode"
"""The pools of a model; aggregated workers are in ``decode``."""


class ServiceFacts(Record):
    """A service of the graph: what its workers run, register and need."""

    #: The Python module that runs; "" for another program.
    program: str = ""
    #: Whether its workers register a model, and so can be scaled.
    registers_model: bool = False
    #: The name under which they register it; "" if only its engine has it.
    model: str = ""
    #: Whether they may register models that the command does not name, such as adapters.
    further_models: bool = False
    #: The pool of its workers; "" for a service that registers no model.
    pool: str = ""
    #: GPUs of each worker, as the graph says; None if it does not.
    gpus: float | None = None
    #: The part of each of its GPUs that an engine reserves when it starts; 0 if unknown.
    memory_share: float = 0.0
    #: The workers that the graph starts.
    workers: int = 1
    #: The least and the most workers, and who gets GPUs first; None: as the planner's options say.
    minimum: int | None = None
    maximum: int | None = None
    priority: int = 0
    #: The keys of ``ServiceArgs`` about its model, as the graph has them.
    model_keys: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def model_args(self) -> ModelArgs:
        """The values of ``model_keys``."""
        return model_args_of(self.model_keys)


class ListenFacts(Record):
    """Where a frontend listens and what a client of it needs."""

    host: str = ""
    port: int = 0
    #: Paths are absolute; "" without such a file.
    tls_cert_path: str = ""
    api_key_file: str = ""
    metrics_prefix: str = name_prefix.FRONTEND
    #: Why there is no address.
    problem: str = ""

    @property
    def address(self) -> FrontendAddress | None:
        """The address; None if it is not fixed in advance."""
        return None if self.problem else FrontendAddress(self.host, self.port, self.has_tls)

    @property
    def has_tls(self) -> bool:
        """Whether it needs TLS."""
        return bool(self.tls_cert_path)


@dataclass(frozen=True)
class FrontendAddress:
    """The address that a frontend listens on, and the one to reach it at."""

    host: str
    port: int
    tls: bool = False

    @property
    def reachable(self) -> str:
        """The host to connect to: loopback of the same family for a wildcard address."""
        if not self.host:
            return "127.0.0.1"
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return self.host  # a host name
        if not address.is_unspecified:
            return self.host
        return "127.0.0.1" if address.version == 4 else "::1"

    @property
    def authority(self) -> str:
        """``host:port`` as in a URL: an IPv6 address has brackets."""
        host = f"[{self.reachable}]" if ":" in self.reachable else self.reachable
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The base URL for a user on this machine."""
        return f"{'https' if self.tls else 'http'}://{self.authority}"
