"""curl: both versions of HTTP, and what it does of its own accord (Expect, upgrades, chunked uploads)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.certificates import Authority
from support.serving import RunningServer
from support.tools import run_tool
from support.wires import RunningWire

pytestmark = pytest.mark.tool("curl")

MIB = 1 << 20
# Any of these reaches our port without TLS; --http2 offers an upgrade, which is not taken.
VERSIONS = {"http1.1": "1.1", "http1.0": "1.1", "http2-prior-knowledge": "2", "http2": "1.1"}


def curl(*arguments: str, input_: bytes | None = None) -> tuple[str, bytes]:
    """The HTTP version and the body of an answer of status 200."""
    shown = run_tool(
        "curl", "-sS", "--max-time", "30", "-w", "\n%{http_version} %{http_code}", *arguments, input_=input_
    )
    body, _, end = shown.rpartition(b"\n")
    version, status = end.decode().split()
    assert status == "200", body
    return version, body


@pytest.mark.parametrize("option", VERSIONS)
def test_get(wire: RunningWire, option: str) -> None:
    assert curl(f"--{option}", f"http://{wire.url}/") == (VERSIONS[option], b"hello")


@pytest.mark.parametrize("size", [0, 1, 1000, 2 * MIB, 64 * MIB])
@pytest.mark.parametrize("option", VERSIONS)
def test_post(wire: RunningWire, tmp_path: Path, option: str, size: int) -> None:
    """From 1 MiB on curl says Expect: 100-continue, and waits for it."""
    body = bytes(range(256)) * (size // 256 + 1)
    (tmp_path / "body").write_bytes(body[:size])
    version, found = curl(f"--{option}", "--data-binary", f"@{tmp_path / 'body'}", f"http://{wire.url}/echo")
    assert (version, found) == (VERSIONS[option], body[:size])


@pytest.mark.parametrize("option", ["http1.1", "http2-prior-knowledge"])
def test_a_chunked_upload(wire: RunningWire, option: str) -> None:
    body = b"0123456789" * 100_000
    arguments = (f"--{option}", "-X", "POST", "-T", "-", f"http://{wire.url}/echo")
    assert curl(*arguments, input_=body)[1] == body


@pytest.mark.parametrize("option", ["http1.1", "http2"])
def test_several_requests_over_one_connection(tls_wire: RunningWire, authority: Authority, option: str) -> None:
    shown = run_tool(
        "curl",
        "-sS",
        f"--{option}",
        "--cacert",
        str(authority.certificate),
        "-w",
        "%{num_connects} ",
        "-o",
        "/dev/null",
        *(f"https://{tls_wire.url}/size/{size}" for size in (0, 10, 100_000)),
    )
    assert [word for word in shown.split() if word in (b"0", b"1")][:1] == [b"1"]
    assert shown.rstrip().endswith(b"0"), "the third request connected anew"


@pytest.mark.parametrize("option", ["http1.1", "http2"])
def test_tls(tls_wire: RunningWire, authority: Authority, option: str) -> None:
    version, body = curl(f"--{option}", "--cacert", str(authority.certificate), f"https://{tls_wire.url}/size/1000000")
    assert body == bytes(1_000_000)
    assert version == {"http1.1": "1.1", "http2": "2"}[option]


@pytest.mark.parametrize("option", ["http1.1", "http2-prior-knowledge"])
def test_inference(one_port: RunningServer, option: str) -> None:
    values = [float(number) for number in range(10_000)]
    document = {"inputs": [{"name": "INPUT0", "shape": [1, 10_000], "datatype": "FP32", "data": values}]}
    _, body = curl(
        f"--{option}",
        "--compressed",
        "-H",
        "Content-Type: application/json",
        "--data-binary",
        "@-",
        f"http://{one_port.http_url}/v2/models/identity/infer",
        input_=json.dumps(document).encode(),
    )
    assert json.loads(body)["outputs"][0]["data"] == values


@pytest.mark.parametrize("option", ["http1.1", "http2-prior-knowledge"])
def test_pieces(wire: RunningWire, option: str) -> None:
    assert curl(f"--{option}", "-N", f"http://{wire.url}/pieces/100/5000")[1] == bytes(500_000)


def test_a_body_beyond_the_limit_is_refused_before_it_is_sent(wire: RunningWire, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(81 * MIB))
    shown = run_tool(
        "curl",
        "-sS",
        "-w",
        "%{http_code} %{size_upload}",
        "-o",
        "/dev/null",
        "--data-binary",
        f"@{tmp_path / 'large'}",
        f"http://{wire.url}/echo",
    )
    status, uploaded = shown.split()
    assert status == b"413"
    assert int(uploaded) < MIB
