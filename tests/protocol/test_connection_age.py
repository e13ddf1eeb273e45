"""Connections that are closed for their age while requests go on over them: none is lost."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.clients import GrpcClient, HttpClient, ProtocolClient
from support.model_files import write_identity
from support.serving import RunningServer, running_server

NUM_CLIENTS = 4
# Ages are looked at once a second: enough for each client to lose its connection twice or so.
DURATION_S = 2.5
# grpcio's core reads the same options once for all channels that share a connection.
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


def _ask_again_and_again(protocol: type[ProtocolClient], server: RunningServer) -> int:
    """The number of requests, each of which was answered rightly."""
    details = {"channel_args": OWN_CONNECTION} if protocol is GrpcClient else {}
    deadline, num_requests = time.monotonic() + DURATION_S, 0
    with protocol(server, **details) as client:
        while time.monotonic() < deadline:
            value = np.full((1, 4), num_requests, np.float32)
            np.testing.assert_array_equal(client.infer("identity", {"INPUT0": value})["OUTPUT0"], value)
            num_requests += 1
    return num_requests


@pytest.mark.parametrize("is_batching", [False, True])
def test_no_request_is_lost_with_its_connection(layout: str, is_batching: bool, tmp_path: Path) -> None:
    write_identity(tmp_path, more="dynamic_batching { }" if is_batching else "")
    options = {"grpc_max_connection_age": 400, "grpc_max_connection_age_grace": 5000}
    protocols = (GrpcClient,) if layout == "grpcio" else (GrpcClient, HttpClient)
    with running_server(tmp_path, **options) as running, ThreadPoolExecutor(2 * NUM_CLIENTS) as pool:
        asked = [
            pool.submit(_ask_again_and_again, protocol, running) for protocol in protocols for _ in range(NUM_CLIENTS)
        ]
        assert min(answered.result() for answered in asked) > 20
        counts = running.server._counts
    if layout in ("native", "native-one-port"):
        assert sum(counts.connections_opened.values()) > 2 * len(asked), "they did age"
        assert not counts.violations
