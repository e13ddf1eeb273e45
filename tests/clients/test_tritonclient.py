"""tritonclient against a whole server with one port, up to the sizes and numbers that its users have."""

from __future__ import annotations

import asyncio
import queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
import tritonclient.utils
from support.serving import RunningServer

MIB = 1 << 20
SIZES = [1, 1000, MIB, 16 * MIB, 64 * MIB]
LIBRARIES = [tritonclient.http, tritonclient.grpc]


def floats(num_bytes: int) -> Any:
    return np.arange(max(num_bytes // 4, 1), dtype=np.float32).reshape(1, -1)


def tensor(library: Any, array: Any) -> Any:
    found = library.InferInput("INPUT0", list(array.shape), "FP32")
    found.set_data_from_numpy(array)
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("library", LIBRARIES, ids=["http", "grpc"])
def test_sizes(one_port: RunningServer, library: Any, size: int) -> None:
    array = floats(size)
    with library.InferenceServerClient(one_port.http_url) as client:
        result = client.infer("identity", [tensor(library, array)])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compression_over_http(one_port: RunningServer, algorithm: str) -> None:
    array = np.zeros((1, 100_000), np.float32)
    with tritonclient.http.InferenceServerClient(one_port.http_url) as client:
        result = client.infer(
            "identity",
            [tensor(tritonclient.http, array)],
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compression_over_grpc(one_port: RunningServer, algorithm: str) -> None:
    array = np.zeros((1, 100_000), np.float32)
    with tritonclient.grpc.InferenceServerClient(one_port.grpc_url) as client:
        result = client.infer("identity", [tensor(tritonclient.grpc, array)], compression_algorithm=algorithm)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)


def test_a_stream_of_1000_requests(one_port: RunningServer) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with tritonclient.grpc.InferenceServerClient(one_port.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(1000):
            array = np.full((1, 4), number, np.float32)
            client.async_stream_infer("identity", [tensor(tritonclient.grpc, array)], request_id=str(number))
        for number in range(1000):
            result, error = answers.get(timeout=30)
            assert error is None
            assert result.get_response().id == str(number)
            assert result.as_numpy("OUTPUT0")[0, 0] == number
        client.stop_stream()


def test_an_error_in_a_stream(one_port: RunningServer) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with tritonclient.grpc.InferenceServerClient(one_port.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("nothing é", [tensor(tritonclient.grpc, floats(16))])
        _, error = answers.get(timeout=30)
        assert "nothing é" in str(error)
        client.async_stream_infer("identity", [tensor(tritonclient.grpc, floats(16))])
        _, error = answers.get(timeout=30)
        assert error is None
        client.stop_stream()


@pytest.mark.parametrize("library", LIBRARIES, ids=["http", "grpc"])
def test_error_texts(one_port: RunningServer, library: Any) -> None:
    with library.InferenceServerClient(one_port.http_url) as client:
        with pytest.raises(tritonclient.utils.InferenceServerException) as raised:
            client.infer("identity", [tensor(library, np.zeros((1, 2, 2), np.float32))])
        assert "INPUT0" in str(raised.value)


@pytest.mark.parametrize("library", [tritonclient.http.aio, tritonclient.grpc.aio], ids=["http", "grpc"])
async def test_asyncio(one_port: RunningServer, library: Any) -> None:
    async with library.InferenceServerClient(one_port.http_url) as client:

        async def one(number: int) -> None:
            array = np.full((1, 16), number, np.float32)
            result = await client.infer("identity", [tensor(library, array)])
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)

        await asyncio.gather(*(one(number) for number in range(100)))


def test_a_client_timeout(one_port: RunningServer) -> None:
    with tritonclient.grpc.InferenceServerClient(one_port.grpc_url) as client:
        result = client.infer("identity", [tensor(tritonclient.grpc, floats(64))], client_timeout=10.0)
    assert result.as_numpy("OUTPUT0").shape == (1, 16)
