"""Abandonment and floods against a whole server: queued work is cancelled, metrics tell, and models go on."""

from __future__ import annotations

import gzip
import re
import subprocess
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from support.gate import BACKEND_DIRECTORY, Gate, write_gated
from support.http2_frames import data, headers, rst_stream
from support.layouts import layout
from support.raw_http1 import Http1Peer
from support.raw_http2 import Peer, call_fields, get_fields, prefixed
from support.repositories import write_model
from support.serving import RunningServer, running_server
from support.tools import tool

from modelserver.pb import grpc_service_pb2 as pb

MIB = 1 << 20
INFER = "/inference.GRPCInferenceService/ModelInfer"
SUCCESSES = r'nv_inference_request_success.*model="identity"'
BODY = b'{"inputs":[{"name":"INPUT0","shape":[1,1],"datatype":"INT32","data":[7]}]}'


class Served:
    """A server with one port, an identity model, and a gated one that a test holds."""

    def __init__(self, server: RunningServer, gate: Gate) -> None:
        self.server = server
        self.gate = gate

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.server.http_url.rpartition(":")
        return host, int(port)

    def metric(self, name: str) -> float:
        """The sum of a family's samples that `name`, a pattern, matches."""
        with urllib.request.urlopen(f"http://{self.server.metrics_url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(name, line))

    def inflight(self) -> int:
        """Requests of all models that wait or execute."""
        models = self.server.server.repository.models
        return self.server.call(lambda: sum(model.inflight for model in models()))

    def until(self, what: str, holds: object) -> None:
        deadline = time.monotonic() + 20
        while not holds():  # type: ignore[operator]
            assert time.monotonic() < deadline, f"waited in vain until {what}"
            time.sleep(0.005)

    def is_served(self) -> None:
        """A client that behaves gets its answer."""
        with Peer(self.address) as peer:
            peer.call(1, INFER, message("identity"))
            answer = peer.expect_answer(1)
            assert answer.grpc_status == 0, answer.grpc_message

    def expect_nothing_left(self) -> None:
        self.until("no request is in flight", lambda: self.inflight() == 0)
        self.until("all streams are closed", lambda: self.metric("modelserver_open_streams") == 0)
        # The one that asks for the metrics is there.
        self.until("all connections are closed", lambda: self.metric("modelserver_open_connections") <= 1)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("models")
    gate = write_gated(repository, "gated", max_batch_size=4)
    write_model(repository, "identity")
    options = {"backend_directory": (BACKEND_DIRECTORY,), "http_max_input_size": 4 * MIB}
    with layout("native-one-port"), running_server(repository, **options) as running:
        yield Served(running, gate)


def message(model: str, size: int = 1) -> bytes:
    """A serialized ModelInferRequest."""
    request = pb.ModelInferRequest(model_name=model)
    tensor = request.inputs.add(name="INPUT0", datatype="INT32")
    tensor.shape.extend([1, size])
    request.raw_input_contents.append(np.zeros(size, np.int32).tobytes())
    return request.SerializeToString()


@pytest.mark.parametrize("how", ["close", "vanish"])
def test_queued_calls_of_a_client_that_leaves_are_cancelled(served: Served, how: str) -> None:
    served.gate.hold()
    peer = Peer(served.address)
    for stream_id in range(1, 129, 2):
        peer.call(stream_id, INFER, message("gated"))
    peer.expect_alive()
    served.until("all are queued or execute", lambda: served.inflight() == 64)
    getattr(peer, how)()
    served.until("what was queued is cancelled", lambda: served.inflight() <= 4)
    served.is_served()
    served.gate.release()
    served.expect_nothing_left()


def test_queued_calls_that_are_reset_are_cancelled(served: Served) -> None:
    served.gate.hold()
    with Peer(served.address) as peer:
        for stream_id in range(1, 129, 2):
            peer.call(stream_id, INFER, message("gated"))
        served.until("all are queued or execute", lambda: served.inflight() == 64)
        peer.send(*(rst_stream(stream_id) for stream_id in range(1, 127, 2)))
        served.until("what was queued is cancelled", lambda: served.inflight() <= 5)
        served.gate.release()
        assert peer.expect_answer(127).grpc_status == 0
    served.expect_nothing_left()


def test_queued_requests_of_http1_clients_that_leave_are_cancelled(served: Served) -> None:
    served.gate.hold()
    peers = [Http1Peer(served.address) for _ in range(40)]
    for peer in peers:
        peer.ask("/v2/models/gated/infer", method="POST", body=BODY)
    served.until("all are queued or execute", lambda: served.inflight() == 40)
    for peer in peers:
        peer.vanish()
    served.until("what was queued is cancelled", lambda: served.inflight() <= 4)
    served.gate.release()
    served.expect_nothing_left()


def test_queued_requests_of_http2_clients_that_leave_are_cancelled(served: Served) -> None:
    served.gate.hold()
    peer = Peer(served.address)
    head = get_fields("/v2/models/gated/infer", ("content-type", "application/json"), method="POST")
    for stream_id in range(1, 81, 2):
        peer.send(headers(stream_id, head, end=False), data(stream_id, BODY, end=True))
    served.until("all are queued or execute", lambda: served.inflight() == 40)
    peer.vanish()
    served.until("what was queued is cancelled", lambda: served.inflight() <= 4)
    served.gate.release()
    served.expect_nothing_left()


def test_a_stream_of_queued_requests_that_is_left(served: Served) -> None:
    served.gate.hold()
    peer = Peer(served.address)
    peer.send(headers(1, call_fields("/inference.GRPCInferenceService/ModelStreamInfer"), end=False))
    for _ in range(64):
        peer.send(data(1, prefixed(message("gated"))))
    served.until("all are queued or execute", lambda: served.inflight() == 64)
    peer.vanish()
    served.until("what was queued is cancelled", lambda: served.inflight() <= 4)
    served.gate.release()
    served.expect_nothing_left()


def test_queued_calls_whose_deadline_passes(served: Served) -> None:
    served.gate.hold()
    with Peer(served.address) as peer:
        for stream_id in range(1, 129, 2):
            peer.call(stream_id, INFER, message("gated"), ("grpc-timeout", "200m"))
        for stream_id in range(1, 129, 2):
            # UNAVAILABLE as soon as it is known that the queue empties too slowly, else DEADLINE_EXCEEDED.
            assert peer.expect_answer(stream_id).grpc_status in (4, 14)
        served.until("what was queued is gone", lambda: served.inflight() <= 4)
        served.gate.release()
    served.expect_nothing_left()


def test_the_metrics_tell_of_attacks(served: Served) -> None:
    resets = r'modelserver_peer_violations_total\{.*reason="too_many_resets"'
    before = served.metric(resets)
    with Peer(served.address) as attacker:
        for stream_id in range(1, 3001, 2):
            attacker.send(headers(stream_id, call_fields(INFER), end=False), rst_stream(stream_id))
        attacker.expect_goaway(11, b"too_many_resets")
    assert served.metric(resets) == before + 1
    served.is_served()
    served.expect_nothing_left()


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress], ids=["gzip", "deflate"])
@pytest.mark.parametrize("is_http2", [False, True], ids=["http1", "http2"])
def test_compressed_bodies_that_unfold(served: Served, compress: Callable[[bytes], bytes], is_http2: bool) -> None:
    """8 MiB of zeros are 8 kB; the limit is for what they become."""
    body = compress(bytes(8 * MIB))
    encoding = "gzip" if compress is gzip.compress else "deflate"
    with httpx.Client(base_url=f"http://{served.server.http_url}", http1=not is_http2, http2=is_http2) as client:
        answer = client.post("/v2/models/identity/infer", content=body, headers={"content-encoding": encoding})
        assert answer.status_code == 413, answer.text
    served.is_served()


@pytest.mark.tool("h2load")
@pytest.mark.slow
def test_h2load_killed_again_and_again(served: Served, tmp_path: Path) -> None:
    """What brought tritonserver 2.51 down: 8 connections with 8 calls each that are gone at once, under load."""
    (tmp_path / "message").write_bytes(prefixed(message("identity", 1000)))
    grpc = ["-H", "content-type: application/grpc", "-H", "te: trailers", "-d", str(tmp_path / "message")]
    url = f"http://{served.server.http_url}{INFER}"

    def kill_clients(times: int) -> int:
        for _ in range(times):
            client = subprocess.Popen(
                [tool("h2load"), "-n", "1000000", "-c", "8", "-m", "8", *grpc, url], stdout=subprocess.DEVNULL
            )
            begun = served.metric(SUCCESSES)
            served.until("it is under way", lambda: served.metric(SUCCESSES) > begun + 500)  # noqa: B023
            client.kill()
            client.wait()
            served.is_served()
        served.expect_nothing_left()
        return int(psutil.Process().memory_info().rss)

    settled = kill_clients(20)
    assert kill_clients(80) - settled < 20 * MIB
