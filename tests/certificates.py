"""Certificates for tests, made by the ``openssl`` command: an authority and what it signs."""

from __future__ import annotations

import functools
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here")


class Authority:
    """An authority in ``directory``. Elliptic keys, because they take no time to make."""

    def __init__(self, directory: Path, name: str = "test authority") -> None:
        self._at = directory
        self.ca = str(directory / "ca.pem")
        self._request(name, "ca", "-x509")

    def sign(self, name: str, days: int = 2) -> tuple[str, str]:
        """Files of a certificate for 127.0.0.1 and localhost, and of its key."""
        at = self._at
        self._request(name, name)
        (at / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
        self._run("x509", "-req", "-in", f"{name}.pem", "-days", str(days), *signed,
                  "-out", f"{name}.crt")  # fmt: skip
        return str(at / f"{name}.crt"), str(at / f"{name}.key")

    def trust(self, cert: str | None = None, key: str | None = None) -> ssl.SSLContext:
        """The context of a client that trusts this authority, with a certificate of its own."""
        context = ssl.create_default_context(cafile=self.ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
        return context

    def _request(self, subject: str, name: str, *more: str) -> None:
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        out = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
        self._run("req", *curve, "-subj", f"/CN={subject}", *out, *more)

    def _run(self, *words: str) -> None:
        subprocess.run(["openssl", *words], cwd=self._at, check=True, capture_output=True)


def replace_file(path: str, content: bytes) -> None:
    """Write a file as certbot does: beside it, then over it."""
    new = Path(f"{path}.new")
    new.write_bytes(content)
    new.replace(path)


@functools.cache
def plain_context() -> ssl.SSLContext:
    """The context of a client that trusts everybody."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
