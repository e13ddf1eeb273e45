"""tritonclient.grpc, unmodified, against the grpcio wire: blocking, asyncio, and streams of both."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from support.echo import EchoControlPlane, EchoModel, echo_dataplane
from tritonclient.utils import InferenceServerException

from modelserver.app.frontends import grpc_frontend
from modelserver.core.datatype import Datatype
from modelserver.repository.state import IndexEntry, ModelState
from modelserver.wire.address import Address
from modelserver.wire.reference.grpcio_server import GrpcioServer

Array = np.ndarray[Any, Any]


class Served:
    """Echo models behind a grpcio server, on a loop in a thread of its own."""

    def __init__(self) -> None:
        self.model = EchoModel()
        self.held = EchoModel("held", holds=True)
        models = [EchoModel(f"echo_{datatype.value}", datatype) for datatype in Datatype]
        self.controlplane = EchoControlPlane(IndexEntry("echo", 1, ModelState.READY))
        frontend = grpc_frontend(echo_dataplane(self.model, self.held, *models), self.controlplane)  # type: ignore[arg-type]
        self._server = GrpcioServer(frontend, Address("127.0.0.1", 0))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-grpcio")

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self._server.port}"

    def __enter__(self) -> Served:
        self._thread.start()
        self.call(self._server.start())
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self._server.stop(1))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        # Its requests lead to grpcio's objects, and pytest holds on to the fixtures of the last test.
        self.held.cancelled.clear()

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def on_loop(self, function: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return function()

        return self.call(run())

    def wait_until(self, condition: Callable[[], bool]) -> None:
        async def run() -> None:
            async with asyncio.timeout(60):
                while not condition():  # noqa: ASYNC110 - what is waited for happens in the client
                    await asyncio.sleep(0.005)

        self.call(run())


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served() as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[tritonclient.grpc.InferenceServerClient]:
    with tritonclient.grpc.InferenceServerClient(served.url) as connected:
        yield connected


def given(data: Array, datatype: str = "FP32") -> list[tritonclient.grpc.InferInput]:
    tensor = tritonclient.grpc.InferInput("INPUT", list(data.shape), datatype)
    tensor.set_data_from_numpy(data)
    return [tensor]


def sample(datatype: Datatype) -> Array:
    if datatype is Datatype.BYTES:
        return np.array([b"a\x00b", b"", "ä".encode()], dtype=object)
    return np.array([1, 0, 1], datatype.numpy)


ONE = np.array([1.5], np.float32)


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("echo")
    assert not client.is_model_ready("unknown")
    assert client.get_server_metadata(as_json=True)["name"] == "modelserver"
    assert client.get_model_metadata("echo", as_json=True)["inputs"][0]["shape"] == ["-1"]
    assert client.get_model_config("echo", as_json=True)["config"]["backend"] == "echo"


# BF16 needs ml_dtypes in the client; test_servicer covers it.
@pytest.mark.parametrize("datatype", [datatype for datatype in Datatype if datatype is not Datatype.BF16])
def test_every_datatype(client: Any, datatype: Datatype) -> None:
    data = sample(datatype)
    result = client.infer(f"echo_{datatype.value}", given(data, datatype.value))
    np.testing.assert_array_equal(result.as_numpy("OUTPUT"), data)


def test_id_version_outputs_and_parameters(client: Any, served: Served) -> None:
    seen: list[Any] = []
    echo = served.model.respond
    served.model.respond = lambda request: [*echo(request), *(seen.append(request) or ())]  # type: ignore[func-returns-value]
    try:
        result = client.infer(
            "echo",
            given(ONE),
            model_version="1",
            outputs=[tritonclient.grpc.InferRequestedOutput("OUTPUT")],
            request_id="q",
            sequence_id=7,
            sequence_start=True,
            priority=2,
            timeout=1000,
            parameters={"mine": "x", "n": 3, "f": 0.5, "b": True},
        )
    finally:
        served.model.respond = echo
    assert (result.get_response().id, result.get_response().model_version) == ("q", "1")
    (request,) = seen
    assert (request.sequence_id, request.sequence_start, request.sequence_end) == (7, True, False)
    assert (request.priority, request.timeout_us) == (2, 1000)
    assert request.parameters == {"mine": "x", "n": 3, "f": 0.5, "b": True}


@pytest.mark.parametrize("algorithm", [None, "gzip", "deflate"])
def test_compressed_requests(client: Any, algorithm: str | None) -> None:
    result = client.infer("echo", given(np.zeros(10_000, np.float32)), compression_algorithm=algorithm)
    assert result.as_numpy("OUTPUT").shape == (10_000,)


def test_errors(client: Any) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.infer("unknown", given(ONE))
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    assert caught.value.message() == "Request for unknown model: 'unknown' is not found"


def test_client_timeout_cancels(client: Any, served: Served) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.infer("held", given(ONE), client_timeout=0.1, request_id="late")
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    served.wait_until(lambda: any(request.id == "late" for request in served.held.cancelled))


def test_async_infer_and_cancel(client: Any, served: Served) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    client.async_infer("echo", given(ONE), callback=lambda result, error: answers.put((result, error)))
    result, error = answers.get(timeout=10)
    assert error is None
    assert result.as_numpy("OUTPUT").tolist() == [1.5]
    context = client.async_infer(
        "held", given(ONE), callback=lambda result, error: answers.put((result, error)), request_id="cancelled"
    )
    served.wait_until(lambda: len(served.held.held) == 1)
    context.cancel()
    assert answers.get(timeout=10)[0] is None
    served.wait_until(lambda: any(request.id == "cancelled" for request in served.held.cancelled))


def test_stream(client: Any) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    for index in range(10):
        model = "unknown" if index == 5 else "echo"
        client.async_stream_infer(model, given(ONE * index), request_id=str(index))
    received = [answers.get(timeout=10) for _ in range(10)]
    client.stop_stream()
    assert "'unknown'" in str(received.pop(5)[1])
    assert [result.get_response().id for result, _ in received] == [str(index) for index in range(10) if index != 5]
    assert all(result.get_response().parameters["triton_final_response"].bool_param for result, _ in received)


def test_stream_stopped_with_its_requests(client: Any, served: Served) -> None:
    client.start_stream(callback=lambda result, error: None)
    client.async_stream_infer("held", given(ONE), request_id="stopped")
    served.wait_until(lambda: len(served.held.held) == 1)
    stream = client._stream
    client.stop_stream(cancel_requests=True)
    stream._request_queue.put(None)  # else the client's own thread waits for requests for ever
    served.wait_until(lambda: any(request.id == "stopped" for request in served.held.cancelled))


def test_statistics(client: Any) -> None:
    (stats,) = client.get_inference_statistics("echo", as_json=True)["model_stats"]
    assert (stats["name"], stats["version"]) == ("echo", "1")
    assert set(stats["inference_stats"]) >= {"success", "fail", "queue", "compute_infer"}


def test_repository_control(client: Any, served: Served) -> None:
    index = client.get_model_repository_index(as_json=True)
    assert index["models"] == [{"name": "echo", "version": "1", "state": "READY"}]
    client.load_model("m", config="{}", files={"file:1/model.onnx": b"\x00"})
    client.unload_model("m")
    assert served.controlplane.asked[-2:] == [
        ("load", "m", {"config": "{}", "file:1/model.onnx": b"\x00"}),
        ("unload", "m", {"unload_dependents": False}),
    ]


def test_shared_memory_is_off(client: Any) -> None:
    assert client.get_system_shared_memory_status(as_json=True) == {}
    assert client.get_cuda_shared_memory_status(as_json=True) == {}
    with pytest.raises(InferenceServerException) as caught:
        client.register_system_shared_memory("r", "/r", 8)
    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


# The clients are no fixtures: pytest holds on to those of the last test, and grpcio keeps a thread for them.
async def test_aio_client(served: Served) -> None:
    async with tritonclient.grpc.aio.InferenceServerClient(served.url) as client:
        assert await client.is_server_ready()
        assert (await client.get_model_metadata("echo")).name == "echo"
        results = await asyncio.gather(*(client.infer("echo", given(ONE * index)) for index in range(100)))
        assert [result.as_numpy("OUTPUT")[0] for result in results] == [1.5 * index for index in range(100)]


async def test_aio_stream(served: Served) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for index in range(10):
            yield {"model_name": "unknown" if index == 5 else "echo", "inputs": given(ONE), "request_id": str(index)}

    async with tritonclient.grpc.aio.InferenceServerClient(served.url) as client:
        received = [pair async for pair in client.stream_infer(requests())]
    assert "'unknown'" in str(received.pop(5)[1])
    assert [result.get_response().id for result, _ in received] == [str(index) for index in range(10) if index != 5]
