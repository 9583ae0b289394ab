"""Mutual TLS between two network namespaces: a frontend in one, a worker in the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from boxes import Etcd, needs_etcd
from certificates import Authority, needs_openssl
from fleet_kit import Fleet
from network_kit import ADDRESSES, Network, why_not

_WHY_NOT = why_not()
pytestmark = [needs_etcd, needs_openssl, pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)]
TEXT = "Whatever I do, I think of the sea. " * 12


class TlsFleet(Fleet):
    """Workers that serve over TLS alone, to clients with a certificate alone."""

    def __init__(self, tmp_path: Path, etcd: str) -> None:
        super().__init__(tmp_path, etcd, None, lease_ttl_s=10)
        authority = Authority(tmp_path)
        worker, frontend = authority.sign("worker"), authority.sign("frontend")
        self._worker = {
            "DYN_TCP_TLS_CERT_PATH": worker[0],
            "DYN_TCP_TLS_KEY_PATH": worker[1],
            "DYN_TCP_TLS_CLIENT_CA_CERT_PATH": authority.ca,
        }
        self.trusted = {
            "DYN_TCP_TLS_CA_CERT_PATH": authority.ca,
            "DYN_TCP_TLS_SERVER_NAME": "localhost",  # workers share a certificate
            "DYN_TCP_TLS_CLIENT_CERT_PATH": frontend[0],
            "DYN_TCP_TLS_CLIENT_KEY_PATH": frontend[1],
        }

    def worker(self) -> Any:
        self.env.update(self._worker)
        try:
            return super().worker()
        finally:
            for name in self._worker:
                del self.env[name]


def test_a_frontend_with_a_certificate_is_served_and_one_without_is_not(tmp_path: Path) -> None:
    network = Network()
    etcd = Etcd(tmp_path, ADDRESSES["hub"])
    fleet = TlsFleet(tmp_path, etcd.url)
    try:
        with network.inside("hub"):
            etcd.start()
        with network.inside("a"):
            fleet.worker()
        with network.inside("hub"):
            plain = fleet.kv_frontend()
            fleet.env.update(fleet.trusted)
            trusted = fleet.kv_frontend()
            fleet.port = trusted
            fleet.wait_for_workers(1)
            status, worker = fleet.ask(TEXT, trusted)
            assert status == 200 and worker is not None
            fleet.until(lambda: fleet.held(TEXT, trusted).get(worker), "its cache is known")
            fleet.port = plain
            fleet.wait_for_workers(1)
            assert fleet.ask(TEXT, plain)[0] == 503
            assert fleet.ask(TEXT, trusted) == (200, worker)
    finally:
        try:
            fleet.close()
        finally:
            etcd.kill()
            network.close()
