"""Certificates of clients on every port and in every layout, beside API keys; and authorities that are replaced."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from support.certificates import Authority, Pair
from support.keys import KeyFile
from support.model_files import write_identity
from support.serving import RunningServer, running_server

from modelserver.auth.api_keys import SCOPES
from modelserver.errors import InvalidArgumentError

LIVE = "/inference.GRPCInferenceService/ServerLive"
METADATA = "/inference.GRPCInferenceService/ServerMetadata"
PATIENCE_S = 60.0


def _http(served: RunningServer, authority: Authority, pair: Pair | None, headers: dict[str, str]) -> list[int]:
    """What HTTP and the metrics answer; 0 where there is no connection to be had."""
    found = []
    for port, path in ((served.server.http_port, "/v2"), (served.server.metrics_port, "/metrics")):
        with httpx.Client(verify=authority.client_context(pair=pair)) as client:
            try:
                found.append(client.get(f"https://127.0.0.1:{port}{path}", headers=headers).status_code)
            except httpx.TransportError:
                found.append(0)
    return found


def _grpc(served: RunningServer, authority: Authority, pair: Pair | None, key: str = "", path: str = METADATA) -> Any:
    """The status of a call, UNAVAILABLE where there is no connection to be had."""
    credentials = grpc.ssl_channel_credentials(
        authority.certificate.read_bytes(),
        pair.key.read_bytes() if pair else None,
        pair.certificate.read_bytes() if pair else None,
    )
    with grpc.secure_channel(f"127.0.0.1:{served.server.grpc_port}", credentials) as channel:
        try:
            channel.unary_unary(path)(b"", metadata=[("x-api-key", key)] if key else [], timeout=10)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def _until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, "the new files were not taken"
        time.sleep(0.1)


def test_clients_show_a_certificate_and_a_key_and_authorities_are_replaced(layout: str, tmp_path: Path) -> None:
    write_identity(tmp_path / "models", "echo")
    keys = KeyFile(tmp_path / "keys.yaml")
    key = keys.add("all", *SCOPES)
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    server_authority = Authority(tmp_path, "servers")
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    client, next_client, pair = old.pair("client"), new.pair("client"), server_authority.pair("server")
    trusted = tmp_path / "clients.pem"
    trusted.write_bytes(old.certificate.read_bytes())
    options: dict[str, Any] = {
        "tls_cert": str(pair.certificate),
        "tls_key": str(pair.key),
        "tls_client_ca": str(trusted),
        "api_keys_file": str(keys.path),
    }
    if layout == "grpcio":
        with pytest.raises(InvalidArgumentError, match="needs --wire=native"), running_server(tmp_path, **options):
            pass
        return
    bearer = {"Authorization": f"Bearer {key}"}
    with running_server(tmp_path / "models", **options) as served:
        for shown in (None, next_client):
            assert _http(served, server_authority, shown, bearer) == [0, 0]
            assert _grpc(served, server_authority, shown, key) is grpc.StatusCode.UNAVAILABLE
        assert _http(served, server_authority, client, {}) == [401, 401]
        assert _grpc(served, server_authority, client) is grpc.StatusCode.UNAUTHENTICATED
        assert _grpc(served, server_authority, client, path=LIVE) is grpc.StatusCode.OK
        assert _http(served, server_authority, client, bearer) == [200, 200]
        assert _grpc(served, server_authority, client, key) is grpc.StatusCode.OK

        replaced = tmp_path / "clients.new"
        replaced.write_bytes(new.certificate.read_bytes())
        replaced.replace(trusted)
        _until(lambda: _http(served, server_authority, next_client, bearer) == [200, 200])
        _until(lambda: _grpc(served, server_authority, next_client, key) is grpc.StatusCode.OK)
        _until(lambda: _http(served, server_authority, client, bearer) == [0, 0])
        _until(lambda: _grpc(served, server_authority, client, key) is grpc.StatusCode.UNAVAILABLE)
