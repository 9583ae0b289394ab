"""Options of verbs that ask the frontend of a running deployment."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """client: which frontend to call"""

    url: str | None = option(
        None, "--url", help="the frontend; default: that of the running deployment"
    )
    namespace: str | None = option(
        None,
        "--namespace",
        help="which deployment, by its namespace; default: DYN_NAMESPACE, else the only one",
    )
    api_key: str | None = option(
        None,
        "--api-key",
        env=("DYN_API_KEY", "OPENAI_API_KEY"),
        help="the API key, if the frontend needs one",
    )
    tls_ca_cert_path: str | None = option(
        None,
        "--tls-ca-cert-path",
        env="DYN_TLS_CA_CERT_PATH",
        help="PEM file of the authority that signed the server's certificate; default: the "
        "system's authorities",
    )


@dataclass(frozen=True, kw_only=True)
class FrontendClientSettings(ClientSettings):
    """frontend: which one to ask, and how"""

    timeout_s: float = option(
        30.0, "--timeout-secs", minimum=0.1, help="seconds to wait for the frontend"
    )
