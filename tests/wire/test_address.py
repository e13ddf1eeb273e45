"""Where a port listens, and what is said when it cannot."""

from __future__ import annotations

import socket

import pytest

from modelserver.errors import UnavailableError
from modelserver.wire.address import MAX_UNSENT_BYTES, Address, authority

HOST = "127.0.0.1"


def test_port_0_is_any_free_one() -> None:
    with Address(HOST, 0).bind() as bound:
        assert bound.getsockname()[1] > 0
        assert not bound.getblocking()


def test_what_a_client_does_not_read_is_not_taken_by_the_system_either() -> None:
    with Address(HOST, 0).bind() as bound, socket.socket() as client:
        bound.listen()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(bound.getsockname())
        bound.setblocking(True)
        accepted, _ = bound.accept()
        with accepted:
            accepted.setblocking(False)
            assert 0 < accepted.send(bytes(16 * MAX_UNSENT_BYTES)) < 2 * MAX_UNSENT_BYTES


def test_a_taken_port_is_named_with_the_flag_to_change() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UnavailableError,
            match=rf"failed to start GRPC service: Unavailable - Socket '{HOST}:{port}' already in use; .*--grpc-port",
        ):
            Address(HOST, port, "--grpc-port", service="GRPC").bind()


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("no such host", "choose another address with --metrics-address"),
        ("192.0.2.1", "this machine has no such address, choose another with --metrics-address"),
    ],
)
def test_an_impossible_address_is_named_with_the_flag_to_change(host: str, told: str) -> None:
    with pytest.raises(UnavailableError, match=f"{host}:1234.*{told}"):
        Address(host, 1234, "--metrics-port").bind()


@pytest.mark.parametrize("reuse_port", [True, False])
def test_a_port_is_shared_only_if_asked(reuse_port: bool) -> None:
    with Address(HOST, 0, reuse_port=reuse_port).bind() as first:
        first.listen()
        second = Address(HOST, first.getsockname()[1], reuse_port=reuse_port)
        if reuse_port:
            second.bind().close()
        else:
            with pytest.raises(UnavailableError):
                second.bind()


@pytest.mark.parametrize(("host", "text"), [("::1", "[::1]:80"), ("0.0.0.0", "0.0.0.0:80"), ("name", "name:80")])
def test_authorities(host: str, text: str) -> None:
    assert authority(host, 80) == text
