"""Connections that are closed for their age while requests go on over them: none is lost."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.clients import GrpcClient, HttpClient, ProtocolClient
from support.model_files import write_identity
from support.serving import RunningServer, running_server

NUM_CLIENTS = 4
NUM_REQUESTS = 20
# Where connections are not counted. Ages are looked at once a second.
DURATION_S = 2.5
# grpcio's core reads the same options once for all channels that share a connection.
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


def _ask_again_and_again(protocol: type[ProtocolClient], server: RunningServer, are_old: Callable[[], bool]) -> None:
    """Until the connections are old, and no less than so many times; each request is answered rightly."""
    details = {"channel_args": OWN_CONNECTION} if protocol is GrpcClient else {}
    numbers = itertools.count()
    with protocol(server, **details) as client:
        while (number := next(numbers)) < NUM_REQUESTS or not are_old():
            value = np.full((1, 4), number, np.float32)
            np.testing.assert_array_equal(client.infer("identity", {"INPUT0": value})["OUTPUT0"], value)


@pytest.mark.parametrize("is_batching", [False, True])
def test_no_request_is_lost_with_its_connection(layout: str, is_batching: bool, tmp_path: Path) -> None:
    write_identity(tmp_path, more="dynamic_batching { }" if is_batching else "")
    options = {"grpc_max_connection_age": 400, "grpc_max_connection_age_grace": 5000}
    protocols = (GrpcClient,) if layout == "grpcio" else (GrpcClient, HttpClient)
    with running_server(tmp_path, **options) as running, ThreadPoolExecutor(2 * NUM_CLIENTS) as pool:
        counts = running.server._counts
        num_clients = NUM_CLIENTS * len(protocols)
        end_s = time.monotonic() + DURATION_S
        is_counted = layout in ("native", "native-one-port")

        def are_old() -> bool:
            if is_counted:
                return sum(counts.connections_opened.values()) > 2 * num_clients
            return time.monotonic() > end_s

        asked = [
            pool.submit(_ask_again_and_again, protocol, running, are_old)
            for protocol in protocols
            for _ in range(NUM_CLIENTS)
        ]
        for answered in asked:
            answered.result()
    assert not is_counted or not counts.violations
