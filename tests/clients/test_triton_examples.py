"""What each of tritonclient's public examples does, written anew: the client unmodified, a whole server."""

from __future__ import annotations

import asyncio
import json
import queue
import uuid
from collections.abc import AsyncIterator, Iterator
from functools import partial
from multiprocessing import resource_tracker
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
import tritonclient.utils.shared_memory as shm
from support.differential.models import LOADED, UNLOADED
from support.serving import RunningServer, running_server
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

# Those of the differential test that the examples need.
SERVED = ("add_sub", "echo_text", "echo_types", "classes", "repeat", "sequence", "ensemble", "told")
FIRST = np.arange(4, dtype=np.float32)
SECOND = np.ones(4, np.float32)
LIBRARIES = {"http": tritonclient.http, "grpc": tritonclient.grpc}


@pytest.fixture(scope="module", autouse=True)
def _no_tracker() -> Iterator[None]:
    """tritonclient makes its regions by `multiprocessing`, which starts a process that looks after them."""
    yield
    resource_tracker._resource_tracker._stop()  # it has no public end


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("examples")
    for name in SERVED:
        LOADED[name].write(root / name)
    UNLOADED["later"].write(root / "later")
    with running_server(root, model_control_mode="explicit", load_model=SERVED, allow_client_shm=True) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def library(request: pytest.FixtureRequest) -> Any:
    return LIBRARIES[request.param]


@pytest.fixture
def client(library: Any, served: RunningServer) -> Iterator[Any]:
    with library.InferenceServerClient(_url(library, served)) as connected:
        yield connected


def _url(library: Any, served: RunningServer) -> str:
    return served.http_url if "http" in library.__name__ else served.grpc_url


def _tensor(library: Any, name: str, data: Any, datatype: str = "FP32") -> Any:
    tensor = library.InferInput(name, list(data.shape), datatype)
    tensor.set_data_from_numpy(data)
    return tensor


def _pair(library: Any) -> list[Any]:
    return [_tensor(library, "INPUT0", FIRST), _tensor(library, "INPUT1", SECOND)]


def _wanted(library: Any) -> list[Any]:
    return [library.InferRequestedOutput("OUTPUT0"), library.InferRequestedOutput("OUTPUT1")]


def _check_pair(result: Any) -> None:
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), FIRST + SECOND)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), FIRST - SECOND)


# --- simple: infer, async_infer, aio ---


def test_infer(client: Any, library: Any) -> None:
    _check_pair(
        client.infer("add_sub", _pair(library), outputs=_wanted(library), request_id="1", headers={"test": "1"})
    )
    statistics = client.get_inference_statistics(model_name="add_sub")
    rows = statistics["model_stats"] if isinstance(statistics, dict) else statistics.model_stats
    assert len(rows) == 1
    with pytest.raises(InferenceServerException, match="wrong_model_name"):
        client.get_inference_statistics(model_name="wrong_model_name")


def test_async_infer_over_http(served: RunningServer) -> None:
    library = tritonclient.http
    with library.InferenceServerClient(served.http_url, concurrency=2) as client:
        calls = [client.async_infer("add_sub", _pair(library), outputs=_wanted(library)) for _ in range(2)]
        for call in calls:
            _check_pair(call.get_result())


def test_async_infer_over_grpc(served: RunningServer) -> None:
    library = tritonclient.grpc
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with library.InferenceServerClient(served.grpc_url) as client:
        client.async_infer(
            "add_sub",
            _pair(library),
            partial(lambda told, result, error: told.put((result, error)), answers),
            outputs=_wanted(library),
        )
        result, error = answers.get(timeout=30)
    assert error is None
    _check_pair(result)


@pytest.mark.parametrize("library", [tritonclient.http.aio, tritonclient.grpc.aio], ids=["http", "grpc"])
async def test_aio_infer(served: RunningServer, library: Any) -> None:
    async with library.InferenceServerClient(_url(library, served)) as client:
        assert await client.is_server_live()
        assert await client.is_model_ready("add_sub")
        results = await asyncio.gather(*(client.infer("add_sub", _pair(library)) for _ in range(3)))
    for result in results:
        _check_pair(result)


def test_offline_bodies(served: RunningServer) -> None:
    """generate_request_body, any HTTP client, parse_response_body."""
    library = tritonclient.http.InferenceServerClient
    body, size = library.generate_request_body(_pair(tritonclient.http), outputs=_wanted(tritonclient.http))
    headers = {} if size is None else {"Inference-Header-Content-Length": str(size)}
    reply = httpx.post(f"http://{served.http_url}/v2/models/add_sub/infer", content=body, headers=headers)
    length = reply.headers.get("Inference-Header-Content-Length")
    _check_pair(library.parse_response_body(reply.content, header_length=None if length is None else int(length)))


# --- strings, explicit contents, reuse ---


def test_strings(client: Any, library: Any) -> None:
    texts = np.array([str(number).encode() for number in range(16)], dtype=object)
    answer = client.infer("echo_text", [_tensor(library, "INPUT0", texts, "BYTES")])
    assert [int(each) for each in answer.as_numpy("OUTPUT0")] == list(range(16))


CONTENTS = {
    "INT8": ("int_contents", [-3, 5], np.int8),
    "INT32": ("int_contents", [1, -2], np.int32),
    "INT64": ("int64_contents", [2**40, -1], np.int64),
    "UINT8": ("uint_contents", [0, 255], np.uint8),
    "UINT64": ("uint64_contents", [0, 2**63], np.uint64),
    "FP32": ("fp32_contents", [1.5, -2.5], np.float32),
    "FP64": ("fp64_contents", [0.1, 1e200], np.float64),
    "BOOL": ("bool_contents", [True, False], np.bool_),
}


@pytest.mark.parametrize("datatype", CONTENTS)
def test_explicit_contents(served: RunningServer, datatype: str) -> None:
    field, values, kind = CONTENTS[datatype]
    request = service_pb2.ModelInferRequest(model_name="echo_types", id="my request id")
    tensor = request.inputs.add(name=f"INPUT_{datatype}", datatype=datatype, shape=[2])
    getattr(tensor.contents, field).extend(values)
    request.outputs.add(name=f"OUTPUT_{datatype}")
    with grpc.insecure_channel(served.grpc_url) as channel:
        reply = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=30)
    assert reply.id == "my request id"
    assert np.frombuffer(reply.raw_output_contents[0], kind).tolist() == values


def test_explicit_byte_contents(served: RunningServer) -> None:
    request = service_pb2.ModelInferRequest(model_name="echo_text")
    request.inputs.add(name="INPUT0", datatype="BYTES", shape=[2]).contents.bytes_contents.extend([b"a", b"\xff"])
    with grpc.insecure_channel(served.grpc_url) as channel:
        reply = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=30)
    assert reply.raw_output_contents[0] == b"\1\0\0\0a\1\0\0\0\xff"


def test_objects_are_used_again(client: Any, library: Any) -> None:
    """The same inputs and outputs: with other data, in shared memory, and out of it again."""
    inputs, outputs = _pair(library), _wanted(library)
    for _ in range(3):
        _check_pair(client.infer("add_sub", inputs, outputs=outputs))
    with _regions(client, [FIRST, SECOND]) as regions:
        for tensor, region in zip(inputs, regions, strict=True):
            tensor.set_shared_memory(region, FIRST.nbytes)
        _check_pair(client.infer("add_sub", inputs, outputs=outputs))
        for tensor, data in zip(inputs, (FIRST, SECOND), strict=True):
            tensor.set_data_from_numpy(data)
    _check_pair(client.infer("add_sub", inputs, outputs=outputs))


# --- system shared memory ---


class _regions:  # noqa: N801 - used as a function is
    """Registered regions with this data, by their names."""

    def __init__(self, client: Any, arrays: list[Any]) -> None:
        self.client = client
        self.arrays = arrays
        self.handles: dict[str, Any] = {}

    def __enter__(self) -> list[str]:
        for array in self.arrays:
            name = f"example_{uuid.uuid4().hex}"
            self.handles[name] = shm.create_shared_memory_region(name, f"/{name}", array.nbytes)
            shm.set_shared_memory_region(self.handles[name], [array])
            self.client.register_system_shared_memory(name, f"/{name}", array.nbytes)
        return list(self.handles)

    def __exit__(self, *_: object) -> None:
        for name, handle in self.handles.items():
            self.client.unregister_system_shared_memory(name)
            shm.destroy_shared_memory_region(handle)


def test_system_shared_memory(client: Any, library: Any) -> None:
    empty = np.zeros(4, np.float32)
    with _regions(client, [FIRST, SECOND, empty, empty]) as names:
        regions = _regions_of(client)
        assert set(names) <= regions
        inputs = [library.InferInput(f"INPUT{index}", [4], "FP32") for index in range(2)]
        outputs = [library.InferRequestedOutput(f"OUTPUT{index}") for index in range(2)]
        for each, name in zip([*inputs, *outputs], names, strict=True):
            each.set_shared_memory(name, FIRST.nbytes)
        result = client.infer("add_sub", inputs, outputs=outputs)
        assert result.get_output("OUTPUT0") is not None
        handle = shm.create_shared_memory_region("again", f"/{names[2]}", FIRST.nbytes)
        np.testing.assert_array_equal(shm.get_contents_as_numpy(handle, np.float32, [4]), FIRST + SECOND)
        shm.destroy_shared_memory_region(handle)
    assert not set(names) & _regions_of(client)


def _regions_of(client: Any) -> set[str]:
    status = client.get_system_shared_memory_status()
    return {each["name"] for each in status} if isinstance(status, list) else set(status.regions)


def test_strings_in_shared_memory(client: Any, library: Any) -> None:
    texts = np.array([b"one", b"", "drei ü".encode()], dtype=object)
    packed = tritonclient.utils.serialize_byte_tensor(texts)
    size = len(packed.item())
    name = f"example_{uuid.uuid4().hex}"
    handle = shm.create_shared_memory_region(name, f"/{name}", size)
    try:
        shm.set_shared_memory_region(handle, [packed])
        client.register_system_shared_memory(name, f"/{name}", size)
        tensor = library.InferInput("INPUT0", [3], "BYTES")
        tensor.set_shared_memory(name, size)
        assert client.infer("echo_text", [tensor]).as_numpy("OUTPUT0").tolist() == texts.tolist()
    finally:
        client.unregister_system_shared_memory()
        shm.destroy_shared_memory_region(handle)


# --- sequences and streams ---


def _step(library: Any, value: int) -> list[Any]:
    return [_tensor(library, "INPUT", np.array([[value]], np.int32), "INT32")]


def test_sequences_step_by_step(served: RunningServer, library: Any) -> None:
    names = (1007, 1008)
    sums = dict.fromkeys(names, 0)
    values = [11, 7, 5, 3, 2, 0, 1]
    with library.InferenceServerClient(_url(library, served)) as client:
        for index, value in enumerate(values):
            for name, sign in zip(names, (1, -1), strict=True):
                result = client.infer(
                    "sequence",
                    _step(library, sign * value),
                    sequence_id=name,
                    sequence_start=index == 0,
                    sequence_end=index == len(values) - 1,
                )
                sums[name] += sign * value
                assert result.as_numpy("OUTPUT").item() == sums[name]


def test_sequences_in_a_stream(served: RunningServer) -> None:
    library = tritonclient.grpc
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    values = [11, 7, 5, 3]
    with library.InferenceServerClient(served.grpc_url) as client:
        client.start_stream(partial(lambda told, result, error: told.put((result, error)), answers))
        for name in (3007, 3008):
            for index, value in enumerate(values):
                client.async_stream_infer(
                    "sequence",
                    _step(library, value),
                    request_id=f"{name}_{index}",
                    sequence_id=name,
                    sequence_start=index == 0,
                    sequence_end=index == len(values) - 1,
                )
        seen: dict[str, int] = {}
        for _ in range(2 * len(values)):
            result, error = answers.get(timeout=30)
            assert error is None, error
            seen[result.get_response().id] = result.as_numpy("OUTPUT").item()
        client.stop_stream()
    assert seen == {f"{name}_{index}": sum(values[: index + 1]) for name in (3007, 3008) for index in range(4)}


async def test_aio_sequence_stream(served: RunningServer) -> None:
    library = tritonclient.grpc.aio
    values = [11, 7, 5]

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for index, value in enumerate(values):
            yield {
                "model_name": "sequence",
                "inputs": _step(tritonclient.grpc, value),
                "request_id": str(index),
                "sequence_id": 4007,
                "sequence_start": index == 0,
                "sequence_end": index == len(values) - 1,
            }

    sums = []
    async with library.InferenceServerClient(served.grpc_url) as client:
        async for result, error in client.stream_infer(requests(), stream_timeout=30):
            assert error is None
            sums.append(result.as_numpy("OUTPUT").item())
    assert sums == [11, 18, 23]


@pytest.mark.parametrize("count", [0, 1, 10])
def test_a_custom_number_of_responses(served: RunningServer, count: int) -> None:
    library = tritonclient.grpc
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    tensor = _tensor(library, "IN", np.array([count], np.int32), "INT32")
    with library.InferenceServerClient(served.grpc_url) as client:
        client.start_stream(partial(lambda told, result, error: told.put((result, error)), answers))
        client.async_stream_infer("repeat", [tensor], request_id="0", enable_empty_final_response=True)
        seen = []
        while True:
            result, error = answers.get(timeout=30)
            assert error is None
            response = result.get_response()
            if response.outputs:
                seen.append(result.as_numpy("OUT").item())
            if response.parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()
    assert seen == list(range(count))


# --- health, metadata, control, arguments ---


def test_health_and_metadata(client: Any, library: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("add_sub")
    details = {} if library is tritonclient.http else {"as_json": True}
    assert client.get_server_metadata(**details)["name"] == "triton"
    assert "model_repository" in client.get_server_metadata(**details)["extensions"]
    assert client.get_model_metadata("add_sub", **details)["name"] == "add_sub"
    config = client.get_model_config("add_sub", **details)
    assert config.get("config", config)["name"] == "add_sub"
    with pytest.raises(InferenceServerException, match="wrong_model_name"):
        client.get_model_metadata("wrong_model_name")


def test_model_control(client: Any) -> None:
    client.load_model("later")
    assert client.is_model_ready("later")
    client.unload_model("later")
    for _ in range(1000):
        if not client.is_model_ready("later"):
            break
    assert not client.is_model_ready("later")
    with pytest.raises(InferenceServerException, match="failed to load 'wrong_model_name'"):
        client.load_model("wrong_model_name")
    with pytest.raises(InferenceServerException, match="failed to load 'later'"):
        client.load_model("later", config='"parameters": {"config": {{"max_batch_size": "16"}}}')
    path = f"file:1/{'A' * 1000}"
    with pytest.raises(InferenceServerException, match="failed to poll from model repository") as refused:
        client.load_model("later", config="{}", files={path: b"a"})
    # Triton says 500; a name that no file can have is the client's mistake.
    assert refused.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")


def test_keepalive(served: RunningServer) -> None:
    options = tritonclient.grpc.KeepAliveOptions(
        keepalive_time_ms=2**31 - 1,
        keepalive_timeout_ms=20_000,
        keepalive_permit_without_calls=False,
        http2_max_pings_without_data=2,
    )
    with tritonclient.grpc.InferenceServerClient(served.grpc_url, keepalive_options=options) as client:
        _check_pair(client.infer("add_sub", _pair(tritonclient.grpc)))


def test_custom_arguments(served: RunningServer) -> None:
    arguments = [("grpc.keepalive_time_ms", 10_000), ("grpc.max_receive_message_length", 1 << 20)]
    with tritonclient.grpc.InferenceServerClient(served.grpc_url, channel_args=arguments) as client:
        _check_pair(
            client.infer("add_sub", _pair(tritonclient.grpc), client_timeout=30.0, compression_algorithm="gzip")
        )


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compression_over_http(served: RunningServer, algorithm: str) -> None:
    with tritonclient.http.InferenceServerClient(served.http_url) as client:
        result = client.infer(
            "add_sub",
            _pair(tritonclient.http),
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
    _check_pair(result)


def test_parameters(client: Any, library: Any) -> None:
    tensor = _tensor(library, "INPUT0", np.array([1], np.int32), "INT32")
    told = client.infer("told", [tensor], parameters={"string": "a", "number": 1, "yes": True}).as_numpy("TOLD")
    assert json.loads(told.item())["parameters"] == {"string": "a", "number": 1, "yes": True}


# --- images: classes, ensembles ---


def test_classification(client: Any, library: Any) -> None:
    scores = np.array([[0.1, 0.4, 0.3, 0.2], [0.7, 0.1, 0.1, 0.1]], np.float32)
    outputs = [library.InferRequestedOutput("OUTPUT0", class_count=2)]
    answer = client.infer("classes", [_tensor(library, "INPUT0", scores)], outputs=outputs).as_numpy("OUTPUT0")
    assert answer.shape == (2, 2)
    assert [each.decode().split(":")[1:] for each in answer[0]] == [["1", "one"], ["2", "two"]]
    assert answer[1][0].decode().endswith(":0:zero")


def test_classification_in_a_stream(served: RunningServer) -> None:
    library = tritonclient.grpc
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    outputs = [library.InferRequestedOutput("OUTPUT0", class_count=1)]
    with library.InferenceServerClient(served.grpc_url) as client:
        client.start_stream(partial(lambda told, result, error: told.put((result, error)), answers))
        scores = np.array([[0.1, 0.4, 0.3, 0.2]], np.float32)
        client.async_stream_infer("classes", [_tensor(library, "INPUT0", scores)], outputs=outputs)
        result, error = answers.get(timeout=30)
        client.stop_stream()
    assert error is None
    assert result.as_numpy("OUTPUT0")[0][0].decode().endswith(":1:one")


def test_a_client_for_each_request(served: RunningServer, library: Any) -> None:
    for _ in range(10):
        with library.InferenceServerClient(_url(library, served)) as client:
            _check_pair(client.infer("add_sub", _pair(library), outputs=_wanted(library)))


def test_an_ensemble(client: Any, library: Any) -> None:
    inputs = [_tensor(library, "A", FIRST), _tensor(library, "B", SECOND)]
    answer = client.infer("ensemble", inputs)
    np.testing.assert_array_equal(answer.as_numpy("TWICE_A"), 2 * FIRST)
    np.testing.assert_array_equal(answer.as_numpy("TWICE_B"), 2 * SECOND)


def test_generate(served: RunningServer) -> None:
    url = f"http://{served.http_url}/v2/models"
    reply = httpx.post(f"{url}/echo_text/generate", json={"INPUT0": "text", "id": "7"})
    assert reply.json() == {"id": "7", "model_name": "echo_text", "model_version": "1", "OUTPUT0": "text"}
    with httpx.stream("POST", f"{url}/repeat/generate_stream", json={"IN": 3}) as stream:
        frames = [json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line]
    assert [frame["OUT"] for frame in frames] == [0, 1, 2]
