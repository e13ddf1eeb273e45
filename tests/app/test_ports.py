"""Which ports a server has and what each of them answers, asked over every protocol that a client may speak."""

from __future__ import annotations

import shutil
import ssl
import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID
from support.certificates import Authority, Pair
from support.layouts import ADDRESS, layout
from support.model_files import write_identity
from support.serving import running_server

from modelserver.app.ports import wire_limits
from modelserver.errors import InvalidArgumentError, NotFoundError
from modelserver.options.server_options import ServerOptions
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.wire.limits import WireLimits

SPOKEN = ("http1", "http2", "grpc")
TLS_PORT_S = 10.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one model."""
    write_identity(tmp_path / "models")
    return tmp_path / "models"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def ask(port: int, spoken: str, tls: ssl.SSLContext | None = None, credentials: Any = None) -> str:
    """What a port says to a client of one protocol: `live`, or how it refuses."""
    if spoken == "grpc":
        return _ask_grpc(port, credentials)
    scheme = "http" if tls is None else "https"
    is_http2 = spoken == "http2"
    with httpx.Client(http1=not is_http2, http2=is_http2, verify=tls or False, timeout=TLS_PORT_S) as client:
        answer = client.get(f"{scheme}://{ADDRESS}:{port}/v2/health/live")
        assert answer.http_version == ("HTTP/2" if is_http2 else "HTTP/1.1")
        return "live" if answer.status_code == 200 else f"{answer.status_code} {answer.json()['error']}"


def _ask_grpc(port: int, credentials: grpc.ChannelCredentials | None) -> str:
    target = f"{ADDRESS}:{port}"
    channel = grpc.secure_channel(target, credentials) if credentials else grpc.insecure_channel(target)
    with channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ServerLive", None, pb.ServerLiveResponse.FromString)
        try:
            return "live" if call(b"", timeout=TLS_PORT_S).live else "not live"
        except grpc.RpcError as error:
            return f"{error.code().name} {error.details()}"


def said(port: int, **details: Any) -> dict[str, str]:
    return {spoken: ask(port, spoken, **details) for spoken in SPOKEN}


ALL = dict.fromkeys(SPOKEN, "live")


def test_both_ports_answer_both_protocols(root: Path) -> None:
    with running_server(root) as running:
        assert running.server.http_port != running.server.grpc_port
        assert said(running.server.http_port) == ALL
        assert said(running.server.grpc_port) == ALL


def test_equal_ports_are_one_that_answers_both(root: Path) -> None:
    with layout("native-one-port"), running_server(root) as running:
        assert running.server.http_port == running.server.grpc_port
        assert said(running.server.http_port) == ALL
        assert list(running.server.addresses) == ["HTTP", "gRPC", "metrics"]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_ports_that_are_not_shared_say_where_the_other_protocol_is(root: Path, num_processes: int) -> None:
    with running_server(root, shared_ports=False, wire_processes=num_processes) as running:
        http, grpc_only = said(running.server.http_port), said(running.server.grpc_port)
    assert (http["http1"], http["http2"]) == ("live", "live")
    assert http["grpc"].startswith("UNIMPLEMENTED this port serves")
    assert grpc_only["grpc"] == "live"
    for spoken in ("http1", "http2"):
        assert grpc_only[spoken] == "404 this port serves gRPC and no HTTP: see --http-port and --shared-ports"


def test_a_protocol_that_is_switched_off_is_nowhere(root: Path) -> None:
    with running_server(root, allow_http=False) as running:
        assert list(running.server.addresses) == ["gRPC", "metrics"]
        grpc_only = said(running.server.grpc_port)
    assert (grpc_only["grpc"], grpc_only["http1"][:3], grpc_only["http2"][:3]) == ("live", "404", "404")
    with running_server(root, allow_grpc=False) as running:
        assert list(running.server.addresses) == ["HTTP", "metrics"]
        http = said(running.server.http_port)
    assert (http["http1"], http["http2"], http["grpc"].split()[0]) == ("live", "live", "UNIMPLEMENTED")


@pytest.mark.parametrize("is_http2", [False, True])
def test_the_port_of_metrics_serves_nothing_else(root: Path, is_http2: bool) -> None:
    with running_server(root) as running, httpx.Client(http1=not is_http2, http2=is_http2) as client:
        text = client.get(f"http://{running.metrics_url}/metrics").text
        assert ask(running.server.metrics_port, "grpc").startswith("UNIMPLEMENTED ")
    spoken = "http2" if is_http2 else "http1"
    assert f'modelserver_open_connections{{protocol="{spoken}"}} 1' in text
    assert f'modelserver_connections_total{{protocol="{spoken}"}} 1' in text
    assert "modelserver_open_streams 0" in text, "the one that asks is not counted before its turn is over"
    assert 'modelserver_peer_violations_total{protocol="http2",reason="too_many_resets"} 0' in text


def test_the_reference_counts_no_connections(root: Path) -> None:
    with running_server(root, wire="grpcio") as running, httpx.Client() as client:
        assert "modelserver_open_connections" not in client.get(f"http://{running.metrics_url}/metrics").text


def test_connections_over_the_limit_are_told(root: Path) -> None:
    with running_server(root, max_connections=1) as running, httpx.Client() as first, httpx.Client() as second:
        url = f"http://{running.http_url}/v2/health/live"
        assert first.get(url).status_code == 200
        refused = second.get(url)
        assert (refused.status_code, "--max-connections" in refused.json()["error"]) == (503, True)
        assert ask(running.server.http_port, "grpc").startswith("UNAVAILABLE ")
        assert ask(running.server.grpc_port, "grpc") == "live", "every port has its own"


# TLS.


def files(pair: Pair, prefix: str = "tls") -> dict[str, str]:
    cert, key = ("tls_cert", "tls_key") if prefix == "tls" else ("grpc_server_cert", "grpc_server_key")
    return {cert: str(pair.certificate), key: str(pair.key)}


def trusting(authority: Authority, pair: Pair | None = None) -> dict[str, Any]:
    """What a client needs in order to trust the server, and to show `pair`."""
    roots = authority.certificate.read_bytes()
    shown = () if pair is None else (pair.key.read_bytes(), pair.certificate.read_bytes())
    credentials = grpc.ssl_channel_credentials(roots, *shown)
    return {"tls": authority.client_context(pair=pair), "credentials": credentials}


@pytest.mark.parametrize("ports", ["native", "native-one-port", "native-processes"])
def test_tls_on_every_port(root: Path, authority: Authority, ports: str) -> None:
    with layout(ports), running_server(root, **files(authority.pair("server"))) as running:
        for port in {running.server.http_port, running.server.grpc_port}:
            assert said(port, **trusting(authority)) == ALL
        with httpx.Client(verify=authority.client_context()) as client:
            assert client.get(f"https://{running.metrics_url}/metrics").status_code == 200
        assert running.server.addresses["HTTP"].startswith("https://")
        assert "this port speaks TLS" in ask(running.server.http_port, "http1")
        assert ask(running.server.grpc_port, "grpc").startswith("UNAVAILABLE ")


def test_tls_that_asks_clients_for_a_certificate(root: Path, authority: Authority) -> None:
    options = files(authority.pair("server")) | {"tls_client_ca": str(authority.certificate)}
    with running_server(root, **options) as running:
        port = running.server.http_port
        assert said(port, **trusting(authority, authority.pair("client"))) == ALL
        with pytest.raises((httpx.HTTPError, ssl.SSLError)):
            ask(port, "http1", **trusting(authority))
        assert ask(port, "grpc", **trusting(authority)).startswith("UNAVAILABLE ")


@pytest.mark.parametrize("is_mutual", [False, True])
def test_grpc_with_tritons_flags_is_on_its_port_only(root: Path, authority: Authority, is_mutual: bool) -> None:
    options: dict[str, Any] = files(authority.pair("server"), "grpc")
    options |= {"grpc_use_ssl_mutual": True, "grpc_root_cert": str(authority.certificate)} if is_mutual else {}
    options |= {} if is_mutual else {"grpc_use_ssl": True}
    client = authority.pair("client") if is_mutual else None
    with running_server(root, **options) as running:
        assert said(running.server.grpc_port, **trusting(authority, client)) == ALL
        if is_mutual:
            assert ask(running.server.grpc_port, "grpc", **trusting(authority)).startswith("UNAVAILABLE ")
        plain = said(running.server.http_port)
    assert (plain["http1"], plain["http2"]) == ("live", "live"), "HTTP has no TLS in Triton"
    assert plain["grpc"].startswith("UNIMPLEMENTED "), "what was to be protected is not offered in the open"


def test_a_certificate_without_its_switch_is_a_warning(
    root: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    with running_server(root, **files(authority.pair("server"), "grpc")) as running:
        assert ask(running.server.grpc_port, "grpc") == "live"
    assert "--grpc-server-cert has no effect without --grpc-use-ssl" in caplog.text


def test_a_wrong_path_is_named_before_a_port_that_is_taken(root: Path) -> None:
    with (
        running_server(root) as running,
        pytest.raises(NotFoundError, match="nothing at that path"),
        running_server(root / "missing", metrics_port=int(running.metrics_url.rpartition(":")[2])),
    ):
        pass


def test_files_that_are_no_good_end_the_start(root: Path, authority: Authority) -> None:
    pair, other = authority.pair("server"), authority.pair("other")
    with (
        pytest.raises(InvalidArgumentError, match=r"--tls-key: .* is not the key of the certificate"),
        running_server(root, tls_cert=str(pair.certificate), tls_key=str(other.key)),
    ):
        pass
    with (
        pytest.raises(InvalidArgumentError, match=r"--grpc-server-key: cannot read '/nowhere': No such file"),
        running_server(root, grpc_use_ssl=True, grpc_server_cert=str(pair.certificate), grpc_server_key="/nowhere"),
    ):
        pass


def test_a_new_certificate_is_taken_while_the_server_runs(root: Path, authority: Authority) -> None:
    pair = authority.pair("server")
    with running_server(root, **files(pair)) as running:
        port = running.server.http_port
        client = httpx.Client(verify=authority.client_context())
        assert client.get(f"https://{ADDRESS}:{port}/v2/health/live").status_code == 200
        renewed = authority.pair("renewed")
        shutil.copy(renewed.key, pair.key)
        shutil.copy(renewed.certificate, pair.certificate)
        deadline = time.monotonic() + 20
        while _name_shown(port) != "renewed":
            assert time.monotonic() < deadline, "the new certificate is not taken"
            time.sleep(0.05)
        assert client.get(f"https://{ADDRESS}:{port}/v2/health/live").status_code == 200, "the old connection lives"
        assert said(port, **trusting(authority)) == ALL
        client.close()


def _name_shown(port: int) -> str:
    shown = x509.load_pem_x509_certificate(ssl.get_server_certificate((ADDRESS, port)).encode())
    return str(shown.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


# Limits.


def test_flags_become_limits() -> None:
    limits = wire_limits(
        ServerOptions(
            max_connections=5,
            max_concurrent_streams=6,
            http_idle_timeout=7,
            http_max_input_size=8,
            grpc_max_request_size=9,
            grpc_keepalive_time=10_000,
            grpc_keepalive_timeout=11_000,
            grpc_keepalive_permit_without_calls=True,
            grpc_http2_max_pings_without_data=12,
            grpc_http2_min_recv_ping_interval_without_data=13_000,
            grpc_http2_max_ping_strikes=14,
            grpc_max_connection_age=15_000,
            grpc_max_connection_age_grace=16_000,
            grpc_infer_response_compression_level="high",
        )
    )
    keepalive = limits.keepalive
    assert (limits.max_connections, limits.http2.max_concurrent_streams, limits.times.http1_idle_s) == (5, 6, 7)
    assert (limits.max_body_bytes, limits.max_message_bytes, limits.grpc_compression) == (8, 9, "high")
    assert (keepalive.ping_after_s, keepalive.ping_timeout_s, keepalive.ping_without_calls) == (10, 11, True)
    assert (keepalive.max_pings_without_data, keepalive.min_ping_interval_s, keepalive.max_ping_strikes) == (12, 13, 14)
    assert (keepalive.max_age_s, keepalive.max_age_grace_s) == (15, 16)


def test_defaults_of_flags_are_defaults_of_limits() -> None:
    """But for the busy polling, which is for a server and not for each port that a test or a program opens."""
    assert wire_limits(ServerOptions(busy_poll_percent=0)) == WireLimits()
