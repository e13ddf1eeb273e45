"""CUDA shared memory, by tritonclient's own utilities, over a driver without a GPU (`support.fake_cuda`)."""

from __future__ import annotations

import base64
import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.clients import ClientError, ProtocolClient
from support.fake_cuda import FakeCuda, runtime_modules
from support.gate import BACKEND_DIRECTORY
from support.gpu_model import MACHINE, write_gpu_model
from support.latches import latch_of, write_latched
from support.model_files import write_identity
from support.serving import RunningServer, running_server
from support.waiting import until_true
from tritonclient.utils import serialize_byte_tensor

from modelserver.errors import ErrorCode
from modelserver.platform.cuda import Cuda, DeviceArray

pytestmark = pytest.mark.one_layout

DATA = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture(scope="module")
def cuda() -> FakeCuda:
    return MACHINE.cuda


@pytest.fixture(scope="module")
def shm(cuda: FakeCuda) -> Iterator[Any]:
    """`tritonclient.utils.cuda_shared_memory`, which imports NVIDIA's package."""
    modules = runtime_modules(cuda)
    sys.modules.update(modules)
    name = "tritonclient.utils.cuda_shared_memory"
    try:
        yield importlib.import_module(name)
    finally:
        for each in (*modules, name, f"{name}._utils"):
            sys.modules.pop(each, None)


@pytest.fixture(scope="module")
def served(layout: str, cuda: FakeCuda, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("served")
    write_identity(root, "echo")
    write_identity(root, "text", data_type="TYPE_STRING")
    write_gpu_model(root, "twice")
    write_gpu_model(
        root, "batched", more="dynamic_batching { max_queue_delay_microseconds: 10000000 preferred_batch_size: 2 }"
    )
    write_gpu_model(root, "cached", more="response_cache { enable: true }")
    write_gpu_model(root, "sequence", more="sequence_batching { }")
    write_identity(root, "hosted", more='parameters { key: "instance_in_process" value { string_value: "true" } }')
    write_ensemble(root)
    write_latched(root, "slow", held="batch", max_batch_size=8)
    with running_server(
        root, allow_client_shm=True, backend_directory=(BACKEND_DIRECTORY,), cache_config=("local,size=1000000",)
    ) as running:
        running.server.dataplane.shared_memory._new_cuda = lambda: Cuda(cuda)
        yield running


def write_ensemble(repository: Path) -> None:
    (repository / "ensemble" / "1").mkdir(parents=True)
    (repository / "ensemble" / "config.pbtxt").write_text("""
platform: "ensemble" max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
ensemble_scheduling { step [ {
  model_name: "twice" model_version: -1
  input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "OUTPUT0" }
} ] }
""")


@pytest.fixture
def client(protocol: type[ProtocolClient], served: RunningServer, cuda: FakeCuda) -> Iterator[ProtocolClient]:
    with protocol(served) as connected:
        yield connected
        connected.raw.unregister_cuda_shared_memory()
        until_true(lambda: not any(found.num_maps for found in cuda.allocations.values()), "regions are unmapped")


def _registered(client: ProtocolClient) -> dict[str, tuple[int, int]]:
    if client.name == "grpc":
        regions = client.raw.get_cuda_shared_memory_status().regions
        return {name: (region.device_id, region.byte_size) for name, region in regions.items()}
    return {row["name"]: (row["device_id"], row["byte_size"]) for row in client.raw.get_cuda_shared_memory_status()}


def _placed(client: ProtocolClient, datatype: str, shape: list[int], num_bytes: int, offset: int) -> tuple[Any, Any]:
    """An input at the beginning of `region`, and an output at `offset`."""
    tensor = client.library.InferInput("INPUT0", shape, datatype)
    tensor.set_shared_memory("region", num_bytes)
    output = client.library.InferRequestedOutput("OUTPUT0")
    output.set_shared_memory("region", 64, offset)
    return tensor, output


def test_tensors_lie_in_the_memory_of_a_gpu(client: ProtocolClient, shm: Any, cuda: FakeCuda) -> None:
    handle = shm.create_shared_memory_region("region", 256, 0)
    shm.set_shared_memory_region(handle, [DATA])
    client.raw.register_cuda_shared_memory("region", shm.get_raw_handle(handle), 0, 256)
    assert _registered(client) == {"region": (0, 256)}
    tensor, output = _placed(client, "FP32", [2, 4], DATA.nbytes, 64)
    del cuda.calls[:]
    client.raw.infer("echo", [tensor], outputs=[output])
    # Each copy is done before what reads it begins: the model, and the client.
    assert cuda.calls == ["cuMemcpyDtoHAsync", "cuStreamSynchronize", "cuMemcpyHtoDAsync", "cuStreamSynchronize"]
    np.testing.assert_array_equal(shm.get_contents_as_numpy(handle, np.float32, [40])[16:24].reshape(2, 4), DATA)
    with pytest.raises(ClientError, match="shared memory region 'region' already in manager"):
        client._call(client.raw.register_cuda_shared_memory, "region", shm.get_raw_handle(handle), 0, 256)
    shm.destroy_shared_memory_region(handle)


def test_texts_lie_there_too(client: ProtocolClient, shm: Any) -> None:
    texts = np.array([b"one", b"", b"three"], dtype=object)
    serialized = serialize_byte_tensor(texts)
    handle = shm.create_shared_memory_region("region", 256, 0)
    shm.set_shared_memory_region(handle, [serialized])
    client.raw.register_cuda_shared_memory("region", shm.get_raw_handle(handle), 0, 256)
    tensor = client.library.InferInput("INPUT0", [1, 3], "BYTES")
    tensor.set_shared_memory("region", len(serialized.item()))
    result = client.raw.infer("text", [tensor])
    assert result.as_numpy("OUTPUT0")[0].tolist() == texts.tolist()
    shm.destroy_shared_memory_region(handle)


def test_memory_stays_until_the_last_request_has_ended(
    client: ProtocolClient, shm: Any, cuda: FakeCuda, served: RunningServer
) -> None:
    """Unregistered in the midst of a request, and freed by the process that allocated it."""
    handle = shm.create_shared_memory_region("region", 256, 0)
    shm.set_shared_memory_region(handle, [np.arange(16, dtype=np.float32)])
    own = list(cuda.allocations.values())[-1]
    client.raw.register_cuda_shared_memory("region", shm.get_raw_handle(handle), 0, 256)
    tensor, output = _placed(client, "FP32", [1, 1], 4, 128)
    del cuda.calls[:]
    latch = latch_of(served, "slow")
    latch.close()
    memory = served.server.dataplane.shared_memory
    answers: list[Any] = []
    with type(client)(served) as other:
        asking = threading.Thread(target=lambda: answers.append(other.raw.infer("slow", [tensor], outputs=[output])))
        asking.start()
        # Its input has been read, and its output waits for the model.
        until_true(lambda: memory.find("region").num_users == 1 and "cuMemcpyDtoHAsync" in cuda.calls, "it runs")
        client.raw.unregister_cuda_shared_memory("region")
        assert _registered(client) == {"region": (0, 256)}
        shm.destroy_shared_memory_region(handle)
        assert own.num_maps == 1
        latch.open()
        asking.join()
    assert answers
    until_true(lambda: own.num_maps == 0, "the region is unmapped")
    assert _registered(client) == {}
    assert np.frombuffer(own.memory, np.float32)[32] == 0.0
    assert cuda.calls[-2:] == ["cuCtxSynchronize", "cuIpcCloseMemHandle"]


def test_two_names_share_one_mapping(client: ProtocolClient, shm: Any, cuda: FakeCuda) -> None:
    handle = shm.create_shared_memory_region("region", 256, 0)
    own = list(cuda.allocations.values())[-1]
    for name in ("region", "again"):
        client.raw.register_cuda_shared_memory(name, shm.get_raw_handle(handle), 0, 256)
    assert own.num_maps == 1
    client.raw.unregister_cuda_shared_memory("again")
    assert _registered(client) == {"region": (0, 256)}
    assert own.num_maps == 1
    shm.destroy_shared_memory_region(handle)


def test_what_cannot_be_registered_is_refused(client: ProtocolClient, shm: Any) -> None:
    handle = shm.create_shared_memory_region("region", 256, 0)
    raw = shm.get_raw_handle(handle)
    for arguments, message in (
        (("region", base64.b64encode(bytes(64)), 0, 8), "failed to open CUDA IPC handle: .*invalid argument"),
        (("region", raw, 7, 8), "there is no GPU 7"),
        (("region", raw, 1 << 32, 8), "there is no GPU 4294967296"),
        (("region", raw, 0, 257), "its handle has 256 bytes, got 257"),
        (("region", raw, 0, 0), "its handle has 256 bytes, got 0"),
        (("", raw, 0, 8), "name is empty"),
    ):
        if client.name == "http" and not arguments[0]:
            continue
        with pytest.raises(ClientError, match=message) as caught:
            client._call(client.raw.register_cuda_shared_memory, *arguments)
        assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert _registered(client) == {}
    client.raw.register_cuda_shared_memory("region", raw, 0, 64)
    for offset, shape, num_bytes in ((0, [2, 4], 16), (60, [2, 4], 32), (300, [2, 4], 32)):
        tensor = client.library.InferInput("INPUT0", shape, "FP32")
        tensor.set_shared_memory("region", num_bytes, offset)
        with pytest.raises(ClientError) as caught:
            client._call(client.raw.infer, "echo", [tensor])
        assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    shm.destroy_shared_memory_region(handle)


def test_a_model_on_the_gpu_uses_the_memory_itself(client: ProtocolClient, shm: Any, cuda: FakeCuda) -> None:
    """Nothing is copied where the memory suits the model; otherwise it goes by the host, with the same answer."""
    handle = shm.create_shared_memory_region("region", 1024, 0)
    client.raw.register_cuda_shared_memory("region", shm.get_raw_handle(handle), 0, 1024)
    copied = {"cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"}
    for start, offset, targets, copies in (
        (0, 256, ["OUTPUT0"], set()),
        (4, 256, ["OUTPUT0"], {"cuMemcpyDtoHAsync"}),
        (0, 260, [], {"cuMemcpyHtoDAsync"}),
    ):
        shm.set_shared_memory_region(handle, [np.zeros(256, np.float32)])
        shm.set_shared_memory_region(handle, [np.pad(DATA.ravel(), (start // 4, 0))])
        tensor, output = _placed(client, "FP32", [2, 4], DATA.nbytes, offset)
        tensor.set_shared_memory("region", DATA.nbytes, start)
        del cuda.calls[:], MACHINE.batches[:]
        client.raw.infer("twice", [tensor], outputs=[output])
        assert copied & set(cuda.calls) == copies
        assert MACHINE.batches == [(np.ndarray if start else DeviceArray, targets)]
        found = shm.get_contents_as_numpy(handle, np.float32, [256])[offset // 4 :][: DATA.size]
        np.testing.assert_array_equal(found.reshape(2, 4), DATA * 2)
    # An output that no region was asked for comes in the message.
    tensor.set_shared_memory("region", DATA.nbytes)
    shm.set_shared_memory_region(handle, [DATA])
    np.testing.assert_array_equal(client.raw.infer("twice", [tensor]).as_numpy("OUTPUT0"), DATA * 2)
    small = client.library.InferRequestedOutput("OUTPUT0")
    small.set_shared_memory("region", 16, 512)
    with pytest.raises(ClientError, match=r"'OUTPUT0' \(16 bytes\) should be at least 32 bytes"):
        client._call(client.raw.infer, "twice", [tensor], outputs=[small])
    tensor.set_shared_memory("region", 16)
    with pytest.raises(ClientError, match="Expected 32, got 16"):
        client._call(client.raw.infer, "twice", [tensor])
    shm.destroy_shared_memory_region(handle)


def test_requests_that_share_a_batch_are_joined_on_the_host(
    client: ProtocolClient, shm: Any, served: RunningServer
) -> None:
    handle = shm.create_shared_memory_region("region", 1024, 0)
    client.raw.register_cuda_shared_memory("region", shm.get_raw_handle(handle), 0, 1024)
    shm.set_shared_memory_region(handle, [np.concatenate([np.full(64, 1.0, np.float32), np.full(64, 2.0, np.float32)])])
    del MACHINE.batches[:]

    def ask(number: int) -> None:
        tensor = client.library.InferInput("INPUT0", [1, 4], "FP32")
        tensor.set_shared_memory("region", 16, number * 256)
        output = client.library.InferRequestedOutput("OUTPUT0")
        output.set_shared_memory("region", 16, 512 + number * 256)
        with type(client)(served) as other:
            other.raw.infer("batched", [tensor], outputs=[output])

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert MACHINE.batches == [(np.ndarray, [])]
    found = shm.get_contents_as_numpy(handle, np.float32, [256])
    assert (found[128], found[192]) == (2.0, 4.0)
    shm.destroy_shared_memory_region(handle)


@pytest.mark.parametrize("case", ["cached", "sequence", "hosted", "ensemble", "traced", "classes"])
def test_what_does_not_use_the_memory_itself_gets_a_copy(
    client: ProtocolClient, shm: Any, cuda: FakeCuda, case: str
) -> None:
    """No model refuses a region of a GPU, whatever the server itself does with the tensors."""
    handle = shm.create_shared_memory_region("region", 1024, 0)
    client.raw.register_cuda_shared_memory("region", shm.get_raw_handle(handle), 0, 1024)
    data = DATA[:1] if case == "sequence" else DATA
    tensor, output = _placed(client, "FP32", list(data.shape), data.nbytes, 256)
    name = {"traced": "twice", "classes": "twice"}.get(case, case)
    options = {"sequence_id": 7, "sequence_start": True, "sequence_end": True} if case == "sequence" else {}
    factor = 1 if case == "hosted" else 2
    if case == "traced":
        client.raw.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"], "trace_rate": "1"})
    try:
        for start in (1, 1, 2):
            shm.set_shared_memory_region(handle, [np.concatenate([data.ravel() + start, np.zeros(100, np.float32)])])
            del cuda.calls[:], MACHINE.batches[:]
            if case == "classes":
                classes = client.library.InferRequestedOutput("OUTPUT0", class_count=1)
                found = client.raw.infer(name, [tensor], outputs=[classes]).as_numpy("OUTPUT0")
                assert found.ravel().tolist() == [f"{6 + 2 * start:f}:3".encode(), f"{14 + 2 * start:f}:3".encode()]
                assert MACHINE.batches == [(DeviceArray, [])]  # only the output is looked at
                continue
            client.raw.infer(name, [tensor], outputs=[output], **options)
            assert {kind for kind, targets in MACHINE.batches} <= {np.ndarray}
            assert [call for call in cuda.calls if "Memcpy" in call] == ["cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"]
            found = shm.get_contents_as_numpy(handle, np.float32, [256])[64 : 64 + data.size]
            np.testing.assert_array_equal(found.reshape(data.shape), (data + start) * factor)
    finally:
        if case == "traced":
            client.raw.update_trace_settings(settings={"trace_level": ["OFF"]})
        shm.destroy_shared_memory_region(handle)


def test_memory_stays_while_a_model_on_the_gpu_uses_it(
    client: ProtocolClient, shm: Any, cuda: FakeCuda, served: RunningServer
) -> None:
    handle = shm.create_shared_memory_region("region", 1024, 0)
    own = list(cuda.allocations.values())[-1]
    shm.set_shared_memory_region(handle, [DATA])
    client.raw.register_cuda_shared_memory("region", shm.get_raw_handle(handle), 0, 1024)
    tensor, output = _placed(client, "FP32", [2, 4], DATA.nbytes, 256)
    MACHINE.may_end.clear()
    MACHINE.is_reached.clear()
    with type(client)(served) as other:
        asking = threading.Thread(target=lambda: other.raw.infer("twice", [tensor], outputs=[output]))
        asking.start()
        assert MACHINE.is_reached.wait(60)
        client.raw.unregister_cuda_shared_memory("region")
        shm.destroy_shared_memory_region(handle)
        assert own.num_maps == 1
        MACHINE.may_end.set()  # it would fail at memory that is freed
        asking.join()
    until_true(lambda: own.num_maps == 0, "the region is unmapped")
    assert np.frombuffer(own.memory, np.float32)[64:72].tolist() == (DATA * 2).ravel().tolist()
