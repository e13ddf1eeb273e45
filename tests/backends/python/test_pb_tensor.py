from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from modelserver_backends.python import pb_tensor
from modelserver_backends.python import triton_python_backend_utils as pb_utils

from modelserver.core.datatype import Datatype
from modelserver.core.tensor import Tensor as CoreTensor

NUMBERS = {"BOOL": 1, "UINT8": 2, "INT32": 8, "INT64": 9, "FP16": 10, "FP32": 11, "FP64": 12, "BYTES": 13, "BF16": 14}


def bf16_input() -> pb_utils.Tensor:
    bits = torch.tensor([1.5, -2.0, 3.25], dtype=torch.bfloat16).view(torch.uint16).numpy()
    return pb_utils.Tensor.of(CoreTensor("x", Datatype.BF16, bits))


def test_a_tensor_knows_its_name_shape_datatype_and_elements() -> None:
    data = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = pb_utils.Tensor("x", data)
    assert (tensor.name(), tensor.shape(), tensor.triton_dtype(), tensor.is_cpu()) == ("x", [2, 3], 11, True)
    assert tensor.as_numpy() is data


@pytest.mark.parametrize("datatype", list(Datatype))
def test_datatype_numbers_are_tritons(datatype: Datatype) -> None:
    tensor = pb_utils.Tensor.of(CoreTensor("x", datatype, np.zeros(1, datatype.numpy)))
    assert NUMBERS.get(datatype.value, tensor.triton_dtype()) == tensor.triton_dtype()
    if datatype is not Datatype.BF16:
        assert pb_utils.triton_string_to_numpy(datatype.config_name) == datatype.numpy.type
        assert pb_utils.triton_to_numpy_type(tensor.triton_dtype()) == datatype.numpy.type
        assert pb_utils.numpy_to_triton_type(datatype.numpy.type) == tensor.triton_dtype()


@pytest.mark.parametrize("array", [np.array(["a", "ü"]), np.array([b"a", b"bc"]), np.array(["a", b"b"], dtype=object)])
def test_all_kinds_of_text_are_bytes(array: np.ndarray) -> None:
    made = pb_utils.Tensor("x", array).core_tensor()
    assert made.datatype is Datatype.BYTES
    assert made.data.dtype == object


def test_big_endian_arrays_are_turned_around() -> None:
    made = pb_utils.Tensor("x", np.array([1, 2], ">i4")).core_tensor()
    assert made.data.dtype == np.int32
    assert made.data.tolist() == [1, 2]


def test_what_no_datatype_carries_is_refused() -> None:
    with pytest.raises(pb_utils.TritonModelException, match="no Triton datatype carries numpy dtype complex128"):
        pb_utils.Tensor("x", np.zeros(1, complex))
    with pytest.raises(TypeError, match=r"made of a numpy\.ndarray, got list"):
        pb_utils.Tensor("x", [1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32, torch.float64])
def test_torch_tensors_pass_through_dlpack_both_ways(dtype: torch.dtype) -> None:
    source = torch.tensor([[0, 1], [1, 0]], dtype=dtype)
    tensor = pb_utils.Tensor.from_dlpack("x", source)
    np.testing.assert_array_equal(tensor.as_numpy(), source.numpy())
    assert torch.equal(torch.from_dlpack(tensor), source)
    assert torch.equal(torch.utils.dlpack.from_dlpack(tensor.to_dlpack()), source)


def test_from_dlpack_takes_capsules_and_shares_memory() -> None:
    source = torch.arange(4, dtype=torch.float32)
    tensor = pb_utils.Tensor.from_dlpack("x", torch.utils.dlpack.to_dlpack(source))
    source[0] = 7
    assert tensor.as_numpy().tolist() == [7, 1, 2, 3]


def test_bf16_goes_by_dlpack_only() -> None:
    tensor = bf16_input()
    with pytest.raises(pb_utils.TritonModelException, match="BF16, which NumPy does not have"):
        tensor.as_numpy()
    values = torch.from_dlpack(tensor)
    assert values.dtype == torch.bfloat16
    assert values.tolist() == [1.5, -2.0, 3.25]
    back = pb_utils.Tensor.from_dlpack("y", values * 2).core_tensor()
    assert back.datatype is Datatype.BF16
    assert torch.from_numpy(back.data.copy()).view(torch.bfloat16).tolist() == [3.0, -4.0, 6.5]


def test_dlpack_has_no_text_and_no_second_use() -> None:
    with pytest.raises(pb_utils.TritonModelException, match="TYPE_STRING, which DLPack cannot carry"):
        pb_utils.Tensor("x", np.array([b"a"], dtype=object)).to_dlpack()
    capsule = pb_utils.Tensor("x", np.zeros(2, np.float32)).to_dlpack()
    pb_utils.Tensor.from_dlpack("y", capsule)
    with pytest.raises(pb_utils.TritonModelException, match="unused DLPack capsule"):
        pb_utils.Tensor.from_dlpack("z", capsule)


def test_bytes_tensors_are_serialized_with_lengths() -> None:
    array = np.array([[b"ab", "ü"], [b"", b"c"]], dtype=object)
    raw = pb_utils.serialize_byte_tensor(array)
    assert raw == b"\2\0\0\0ab\2\0\0\0\xc3\xbc\0\0\0\0\1\0\0\0c"
    assert pb_utils.deserialize_bytes_tensor(raw).tolist() == [b"ab", "ü".encode(), b"", b"c"]
    assert pb_utils.deserialize_bytes_tensor(b"").tolist() == []
    with pytest.raises(pb_utils.TritonModelException, match="invalid datatype int64"):
        pb_utils.serialize_byte_tensor(np.zeros(1, np.int64))


class _Elsewhere:
    """A tensor that says it is on a device, of a kind whose memory PyTorch reads as it reads the host's."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_options: object) -> object:
        return self._tensor.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 7, 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_on_a_device_stays_there_until_the_server_needs_it(dtype: torch.dtype) -> None:
    source = torch.arange(6, dtype=dtype).reshape(2, 3)
    tensor = pb_utils.Tensor.from_dlpack("x", _Elsewhere(source))
    assert (tensor.is_cpu(), tensor.shape(), tensor.__dlpack_device__()) == (False, [2, 3], (7, 1))
    with pytest.raises(pb_utils.TritonModelException, match="stored in GPU"):
        tensor.as_numpy()
    assert torch.equal(torch.utils.dlpack.from_dlpack(tensor.to_dlpack()), source)
    sent = tensor.core_tensor()
    assert torch.equal(torch.from_dlpack(pb_utils.Tensor.of(sent)), source)


def test_a_capsule_of_a_device_that_is_not_there_is_told_so() -> None:
    capsule = torch.utils.dlpack.to_dlpack(torch.zeros(2))
    address = pb_tensor._dltensor_address(capsule) + pb_tensor._DLPACK_DEVICE_OFFSET
    ctypes.c_int32.from_address(address).value = 2  # CUDA
    try:
        with pytest.raises(pb_utils.TritonModelException, match=r"'x' is on a device \(DLPack type 2\).*to the CPU"):
            pb_utils.Tensor.from_dlpack("x", capsule)
    finally:
        ctypes.c_int32.from_address(address).value = 1


def test_a_tensor_of_a_gpu_is_read_behind_what_its_stream_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model computes on a stream of its own, and of a GPU that is not the current one elsewhere."""
    own, other = SimpleNamespace(cuda_stream=7), SimpleNamespace(cuda_stream=0)
    current = [other]
    seen: list[tuple[str, object]] = []

    @contextmanager
    def use(stream: SimpleNamespace) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    class Made(_Elsewhere):
        def __dlpack__(self, **options: object) -> object:
            seen.append((f"exported for {options['stream']}", current[-1]))
            assert not {"dl_device", "copy"} & set(options), "a producer of an older version knows none of these"
            return super().__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 1

    read = torch.Tensor.cpu
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda it: seen.append(("read", current[-1])) or read(it))
    with use(own):
        tensor = pb_utils.Tensor.from_dlpack("x", Made(torch.arange(3.0)))
    tensor.__dlpack__(stream=9)
    assert tensor.core_tensor().data.tolist() == [0, 1, 2]
    assert seen == [("exported for 7", own), ("exported for 9", own), ("read", own)]


def test_a_consumer_gets_the_copy_that_it_asks_for_and_no_other_device() -> None:
    array = np.zeros(3, np.float32)
    tensor = pb_utils.Tensor("x", array)
    copied = torch.utils.dlpack.from_dlpack(tensor.__dlpack__(copy=True))
    shared = torch.utils.dlpack.from_dlpack(tensor.__dlpack__(dl_device=(1, 0)))
    array[:] = 5
    assert (copied.tolist(), shared.tolist()) == ([0, 0, 0], [5, 5, 5])
    with pytest.raises(BufferError, match="in the host's memory"):
        tensor.__dlpack__(dl_device=(2, 0))
