"""Options of the verbs that ask a running frontend."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option

__all__ = ["FrontendClientSettings"]


@dataclass(frozen=True, kw_only=True)
class FrontendClientSettings:
    """frontend: which one to ask, and how"""

    url: str = option("http://127.0.0.1:8000", "--url", help="the frontend")
    api_key: str | None = option(
        None,
        "--api-key",
        env=("DYN_API_KEY", "OPENAI_API_KEY"),
        help="an operator's key, if the frontend needs one",
    )
    tls_ca_cert_path: str | None = option(
        None,
        "--tls-ca-cert-path",
        env="DYN_TLS_CA_CERT_PATH",
        help="PEM file of the authority that signed the server's certificate; default: the "
        "system's authorities",
    )
    timeout_s: float = option(
        30.0, "--timeout-secs", minimum=0.1, help="seconds to wait for the frontend"
    )
