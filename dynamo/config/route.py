"""Options of ``dynamo route``."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option

__all__ = ["RouteSettings"]


@dataclass(frozen=True, kw_only=True)
class RouteSettings:
    """route: which prompt, and which frontend to ask"""

    prompt_file: str | None = option(
        None,
        "--prompt-file",
        help="text of a prompt, or the JSON body of a chat or completion request; - for stdin",
    )
    url: str = option("http://127.0.0.1:8000", "--url", help="the frontend")
    api_key: str | None = option(
        None,
        "--api-key",
        env="OPENAI_API_KEY",
        help="an operator's key, if the frontend needs one",
    )
    tls_ca_cert_path: str | None = option(
        None,
        "--tls-ca-cert-path",
        env="DYN_TLS_CA_CERT_PATH",
        help="PEM file of the authority that signed the server's certificate; default: the "
        "system's authorities",
    )
    model: str | None = option(None, "--model", help="default: the frontend's first")
    explain: bool = option(False, "--explain", help="show all candidates and their cost")
    json: bool = option(False, "--json", help="print the answer as JSON")
    timeout_s: float = option(
        30.0, "--timeout-secs", minimum=0.1, help="seconds to wait for the frontend"
    )
