"""System shared memory, by tritonclient's own utilities: registered regions, and tensors in them."""

from __future__ import annotations

import base64
import queue
import threading
import uuid
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.utils.shared_memory as shm
from support.clients import ClientError, ProtocolClient
from support.gate import BACKEND_DIRECTORY
from support.latches import latch_of, write_latched
from support.model_files import write_identity
from support.serving import RunningServer, running_server
from support.waiting import PATIENCE_S, until_true
from tritonclient.utils import serialize_byte_tensor

from modelserver.errors import ErrorCode

DATA = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture(scope="module", autouse=True)
def _no_tracker() -> Iterator[None]:
    """tritonclient makes its regions by `multiprocessing`, which starts a process that looks after them."""
    yield
    resource_tracker._resource_tracker._stop()  # it has no public end


@pytest.fixture(scope="module")
def served(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("served")
    write_identity(root, "echo")
    write_identity(root, "text", data_type="TYPE_STRING")
    write_latched(root, "slow", held="batch", max_batch_size=8)
    with running_server(root, allow_client_shm=True, backend_directory=(BACKEND_DIRECTORY,)) as running:
        yield running


@pytest.fixture
def client(protocol: type[ProtocolClient], served: RunningServer) -> Iterator[ProtocolClient]:
    with protocol(served) as connected:
        yield connected
        connected.raw.unregister_system_shared_memory()


@pytest.fixture
def key() -> Iterator[str]:
    """A shared memory object of 256 bytes, whose handle is `key.handle`."""
    name = f"/modelserver-test-{uuid.uuid4().hex}"
    handle = shm.create_shared_memory_region(name, name, 256)
    _HANDLES[name] = handle
    yield name
    del _HANDLES[name]
    shm.destroy_shared_memory_region(handle)


_HANDLES: dict[str, Any] = {}


def _input(client: ProtocolClient, region: str, data: np.ndarray, offset: int = 0, datatype: str = "FP32") -> Any:
    tensor = client.library.InferInput("INPUT0", list(data.shape), datatype)
    tensor.set_shared_memory(region, data.nbytes, offset)
    return tensor


def _output(client: ProtocolClient, region: str, num_bytes: int, offset: int = 0) -> Any:
    output = client.library.InferRequestedOutput("OUTPUT0")
    output.set_shared_memory(region, num_bytes, offset)
    return output


def _registered(client: ProtocolClient) -> dict[str, dict[str, Any]]:
    rows: Any = client._json(client.raw.get_system_shared_memory_status)
    rows = list(rows.get("regions", {}).values()) if isinstance(rows, dict) else rows
    return {row["name"]: row for row in rows}


def _infer(client: ProtocolClient, model: str, *tensors: Any, outputs: list[Any] | None = None) -> Any:
    return client._call(client.raw.infer, model, list(tensors), outputs=outputs)


def test_tensors_come_from_a_region_and_go_to_another_part_of_it(client: ProtocolClient, key: str) -> None:
    assert "system_shared_memory" in client.server_metadata()["extensions"]
    client.raw.register_system_shared_memory("region", key, 256)
    for data in (DATA, DATA + 1, DATA + 2):  # known requests are decoded another way
        shm.set_shared_memory_region(_HANDLES[key], [data])
        result = _infer(client, "echo", _input(client, "region", DATA), outputs=[_output(client, "region", 32, 64)])
        head = result.get_output("OUTPUT0")
        assert list(head["shape"] if isinstance(head, dict) else head.shape) == [2, 4]
        found = shm.get_contents_as_numpy(_HANDLES[key], np.float32, [2, 4], offset=64)
        np.testing.assert_array_equal(found, data)


def test_only_the_input_or_only_the_output_is_in_a_region(client: ProtocolClient, key: str) -> None:
    shm.set_shared_memory_region(_HANDLES[key], [DATA])
    client.raw.register_system_shared_memory("region", key, 128, 0)
    result = _infer(client, "echo", _input(client, "region", DATA))
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), DATA)
    tensor = client.library.InferInput("INPUT0", [1, 4], "FP32")
    for value in (3, 4):
        tensor.set_data_from_numpy(np.full((1, 4), value, np.float32))
        _infer(client, "echo", tensor, outputs=[_output(client, "region", 16, 16)])
        found = shm.get_contents_as_numpy(_HANDLES[key], np.float32, [4], offset=16)
        assert found.tolist() == [value] * 4


def test_a_region_may_begin_within_its_object_and_several_share_one(client: ProtocolClient, key: str) -> None:
    shm.set_shared_memory_region(_HANDLES[key], [DATA], offset=96)
    client.raw.register_system_shared_memory("in", key, 64, offset=64)
    client.raw.register_system_shared_memory("out", key, 256)
    _infer(client, "echo", _input(client, "in", DATA, 32), outputs=[_output(client, "out", 32)])
    np.testing.assert_array_equal(shm.get_contents_as_numpy(_HANDLES[key], np.float32, [2, 4]), DATA)
    rows = _registered(client)
    assert {name: (row["key"], row.get("offset", 0), row["byte_size"]) for name, row in rows.items()} == {
        "in": (key, 64, 64),
        "out": (key, 0, 256),
    }


def test_strings_in_regions(client: ProtocolClient, key: str) -> None:
    words = np.array([[b"one", b"", b"drei"]], dtype=object)
    shm.set_shared_memory_region(_HANDLES[key], [serialize_byte_tensor(words)])
    size = sum(4 + len(word) for word in words.ravel())
    client.raw.register_system_shared_memory("region", key, 256)
    tensor = client.library.InferInput("INPUT0", [1, 3], "BYTES")
    tensor.set_shared_memory("region", size)
    _infer(client, "text", tensor, outputs=[_output(client, "region", 100, 100)])
    found = shm.get_contents_as_numpy(_HANDLES[key], np.object_, [1, 3], offset=100)
    np.testing.assert_array_equal(found, words)


@pytest.mark.parametrize(
    ("region", "size", "offset", "text"),
    [
        ("nope", 32, 0, "Unable to find shared memory region: 'nope'"),
        ("region", 32, 256, "Invalid offset for shared memory region: 'region'"),
        ("region", 32, 2**62, "Invalid offset for shared memory region: 'region'"),
        ("region", 32, 240, "Invalid offset + byte size for shared memory region: 'region'"),
        ("region", 2**62, 1, "Invalid offset + byte size for shared memory region: 'region'"),
    ],
)
def test_slices_outside_of_regions_are_refused(
    client: ProtocolClient, key: str, region: str, size: int, offset: int, text: str
) -> None:
    client.raw.register_system_shared_memory("region", key, 256)
    tensor = client.library.InferInput("INPUT0", [2, 4], "FP32")
    tensor.set_shared_memory(region, size, offset)
    with pytest.raises(ClientError, match="shared memory region") as caught:
        _infer(client, "echo", tensor)
    assert text in caught.value.message
    assert caught.value.code is (ErrorCode.NOT_FOUND if region == "nope" else ErrorCode.INVALID_ARGUMENT)
    tensor.set_data_from_numpy(DATA)
    with pytest.raises(ClientError) as caught:
        _infer(client, "echo", tensor, outputs=[_output(client, region, size, offset)])
    assert text in caught.value.message


def test_a_slice_that_no_memory_has_is_refused_in_tritons_words(client: ProtocolClient, key: str) -> None:
    client.raw.register_system_shared_memory("region", key, 256)
    output = _output(client, "region", 2**63 - 1 if client.name == "grpc" else 2**64 - 32, 32)
    expected = (
        r"Invalid offset \+ byte size" if client.name == "grpc" else r"Integer overflow detected: byte_size \(1844"
    )
    with pytest.raises(ClientError, match=expected):
        _infer(client, "echo", _input(client, "region", DATA), outputs=[output])


def test_sizes_that_do_not_fit_the_tensor_are_refused(client: ProtocolClient, key: str) -> None:
    client.raw.register_system_shared_memory("region", key, 256)
    tensor = client.library.InferInput("INPUT0", [2, 4], "FP32")
    tensor.set_shared_memory("region", 28)
    with pytest.raises(ClientError, match=r"input byte size mismatch for input 'INPUT0' for model 'echo'"):
        _infer(client, "echo", tensor)
    with pytest.raises(ClientError, match="should be at least 32 bytes to hold the results") as caught:
        _infer(client, "echo", _input(client, "region", DATA), outputs=[_output(client, "region", 31, 64)])
    assert caught.value.code is ErrorCode.INTERNAL


def test_a_file_that_has_become_smaller_is_noticed(client: ProtocolClient, key: str) -> None:
    client.raw.register_system_shared_memory("region", key, 256)
    with Path(f"/dev/shm{key}").open("r+b") as file:
        file.truncate(16)
        try:
            with pytest.raises(ClientError, match="has become smaller"):
                _infer(client, "echo", _input(client, "region", DATA))
        finally:
            file.truncate(256)


@pytest.mark.parametrize("is_output_in_region", [True, False])
def test_a_file_that_becomes_smaller_during_a_request_fails_that_request(
    client: ProtocolClient, served: RunningServer, key: str, is_output_in_region: bool
) -> None:
    latch = latch_of(served, "slow")
    latch.close()
    shm.set_shared_memory_region(_HANDLES[key], [DATA])
    raw = client.raw
    raw.register_system_shared_memory("region", key, 256)
    outputs = [_output(client, "region", 32, 64)] if is_output_in_region else None
    failures: queue.Queue[Any] = queue.Queue()

    def ask() -> None:
        with type(client)(served) as other:
            try:
                _infer(other, "slow", _input(other, "region", DATA), outputs=outputs)
                failures.put(None)
            except ClientError as error:
                failures.put(error)

    asking = threading.Thread(target=ask)
    asking.start()
    memory = served.server.dataplane.shared_memory
    until_true(lambda: memory.find("region").num_users > 0, "the request came")
    with Path(f"/dev/shm{key}").open("r+b") as file:
        file.truncate(0)
        try:
            latch.open()
            failure = failures.get(timeout=PATIENCE_S)
        finally:
            file.truncate(256)
        asking.join(PATIENCE_S)
    assert failure is not None
    assert "has become smaller since it was registered" in failure.message
    assert failure.code is ErrorCode.INVALID_ARGUMENT
    raw.unregister_system_shared_memory("region")
    raw.register_system_shared_memory("region", key, 256)
    shm.set_shared_memory_region(_HANDLES[key], [DATA])
    result = _infer(client, "echo", _input(client, "region", DATA))
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), DATA)


@pytest.mark.parametrize(
    ("name", "key_of", "size", "offset", "text"),
    [
        ("r", "/modelserver-no-such-object", 8, 0, "Unable to open shared memory region"),
        ("r", "/../etc/passwd", 8, 0, "cannot register shared memory region .* - invalid shm key"),
        ("r", "", 8, 0, "cannot register shared memory region .* - invalid shm key"),
        ("r", None, 257, 0, "failed to register shared memory region .* invalid args"),
        ("r", None, 8, 250, "failed to register shared memory region .* invalid args"),
        ("r", None, 0, 0, "failed to register shared memory region .* invalid args"),
        ("r", None, 8, 2**63, "failed to register shared memory region .* invalid args"),
        ("triton_python_backend_shm_region_1", None, 8, 0, "reserved"),
    ],
)
def test_registrations_that_cannot_be_are_refused(
    client: ProtocolClient, key: str, name: str, key_of: str | None, size: int, offset: int, text: str
) -> None:
    with pytest.raises(ClientError, match=text):
        client._call(client.raw.register_system_shared_memory, name, key if key_of is None else key_of, size, offset)
    assert name not in _registered(client)


def test_names_are_taken_until_they_are_unregistered(client: ProtocolClient, key: str) -> None:
    raw = client.raw
    raw.register_system_shared_memory("region", key, 256)
    with pytest.raises(ClientError, match="shared memory region 'region' already in manager"):
        client._call(raw.register_system_shared_memory, "region", key, 256)
    raw.unregister_system_shared_memory("region")
    raw.unregister_system_shared_memory("region")  # what is not there is forgotten already
    assert _registered(client) == {}
    with pytest.raises(ClientError, match="Unable to find system shared memory region: 'region'"):
        client._call(raw.get_system_shared_memory_status, "region")
    raw.register_system_shared_memory("region", key, 128)
    assert _registered(client)["region"]["byte_size"] == 128


def test_a_region_in_use_goes_with_its_last_request(client: ProtocolClient, served: RunningServer, key: str) -> None:
    latch = latch_of(served, "slow")
    latch.close()
    shm.set_shared_memory_region(_HANDLES[key], [DATA])
    raw = client.raw
    raw.register_system_shared_memory("region", key, 256)
    arguments = ("slow", [_input(client, "region", DATA)])
    outputs = [_output(client, "region", 32, 64)]
    if client.name == "http":
        pending = raw.async_infer(*arguments, outputs=outputs)
    else:
        answers: queue.Queue[Any] = queue.Queue()
        raw.async_infer(*arguments, lambda result, error: answers.put(error), outputs=outputs)
    with type(client)(served) as other:
        memory = served.server.dataplane.shared_memory
        until_true(lambda: memory.find("region").num_users > 0, "the request came")
        other.raw.unregister_system_shared_memory("region")
        assert "region" in _registered(other)
        latch.open()
        if client.name == "http":
            pending.get_result()
        else:
            assert answers.get(timeout=PATIENCE_S) is None
        assert _registered(other) == {}
    np.testing.assert_array_equal(shm.get_contents_as_numpy(_HANDLES[key], np.float32, [2, 4], offset=64), DATA)


def test_without_the_flag_nothing_is_registered(
    protocol: type[ProtocolClient], server: RunningServer, key: str
) -> None:
    with protocol(server) as client:
        for call in (
            lambda: client.raw.register_system_shared_memory("region", key, 256),
            lambda: client.raw.unregister_system_shared_memory("region"),
            lambda: client.raw.register_cuda_shared_memory("region", b"A" * 88, 0, 8),
        ):
            with pytest.raises(ClientError, match="--allow-client-shm=true") as caught:
                client._call(call)
            assert caught.value.code is ErrorCode.UNSUPPORTED
        assert _registered(client) == {}
        client.raw.unregister_system_shared_memory()


def test_cuda_regions_are_refused_with_a_reason(client: ProtocolClient) -> None:
    raw = client.raw
    handle = base64.b64encode(bytes(64))
    with pytest.raises(
        ClientError,
        match=r"failed to register CUDA shared memory region: 'region', GPUs not supported: .* use system shared",
    ) as caught:
        client._call(raw.register_cuda_shared_memory, "region", handle, 0, 8)
    assert caught.value.code is ErrorCode.UNSUPPORTED
    raw.unregister_cuda_shared_memory()
    raw.unregister_cuda_shared_memory("region")
    assert not raw.get_cuda_shared_memory_status() or client.name == "grpc"
    with pytest.raises(ClientError, match="Unable to find cuda shared memory region: 'region'"):
        client._call(raw.get_cuda_shared_memory_status, "region")
