"""Certificates that have expired, and are replaced while the server runs: on each port."""

from __future__ import annotations

import http.client
import ssl
import time
from pathlib import Path

import pytest
from support.asking import wait_for
from support.certificates import Authority, Pair
from support.model_files import write_identity
from support.processes import ServerProcess, serving_process


def ask_over_tls(port: int, path: str, context: ssl.SSLContext) -> int:
    return get_over_tls(port, path, context)[0]


def get_over_tls(port: int, path: str, context: ssl.SSLContext) -> tuple[int, bytes]:
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def replace(old: Pair, new: Pair) -> None:
    """Put the files of one pair where those of the other were."""
    new.key.replace(old.key)
    new.certificate.replace(old.certificate)


def ports(server: ServerProcess) -> dict[int, str]:
    """Each port, and a path that answers there."""
    ready = "/v2/health/ready"
    return {server.port("HTTP"): ready, server.port("gRPC"): ready, server.port("metrics"): "/metrics"}


def test_an_expired_certificate_of_the_server_is_replaced_without_a_restart(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    expired = authority.pair("server", is_expired=True)
    write_identity(tmp_path / "models")
    flags = [f"--tls-cert={expired.certificate}", f"--tls-key={expired.key}"]
    with serving_process(tmp_path / "models", *flags) as server:
        server.wait_for(r"^metrics +https")
        context = authority.client_context()
        for port, path in ports(server).items():
            with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
                ask_over_tls(port, path, context)
        replace(expired, authority.pair("renewed"))
        for port, path in ports(server).items():
            wait_for(lambda: is_trusted(port, path, context), f"port {port} has the new one")  # noqa: B023
        assert seconds_left(server, context) > 0
        server.signal()
        assert server.wait() == 0


def seconds_left(server: ServerProcess, context: ssl.SSLContext) -> float:
    """Until the certificate that is in use expires, by the metrics."""
    text = get_over_tls(server.port("metrics"), "/metrics", context)[1].decode()
    name = "modelserver_certificate_not_after_timestamp_seconds"
    (line,) = [line for line in text.splitlines() if line.startswith(f'{name}{{flag="--tls-cert"}}')]
    return float(line.rpartition(" ")[2]) - time.time()


def is_trusted(port: int, path: str, context: ssl.SSLContext) -> bool:
    try:
        return ask_over_tls(port, path, context) == 200
    except ssl.SSLCertVerificationError:
        return False


def test_an_expired_certificate_of_a_client_is_refused_and_others_are_not(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server_pair = authority.pair("server")
    write_identity(tmp_path / "models")
    flags = [
        f"--tls-cert={server_pair.certificate}",
        f"--tls-key={server_pair.key}",
        f"--tls-client-ca={authority.certificate}",
    ]
    with serving_process(tmp_path / "models", *flags) as server:
        server.wait_for(r"^metrics +https")
        valid = authority.client_context(pair=authority.pair("valid"))
        expired = authority.client_context(pair=authority.pair("expired", is_expired=True))
        for port, path in ports(server).items():
            with pytest.raises((ssl.SSLError, ConnectionError)):
                ask_over_tls(port, path, expired)
            assert ask_over_tls(port, path, valid) == 200
        server.signal()
        assert server.wait() == 0
