"""An instance's way to its GPU, on one that computes only when it is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from modelserver_backends.pytorch.binding import InputBinding
from modelserver_backends.pytorch.cuda_lane import MAX_GRAPHS, CudaLane
from modelserver_backends.pytorch.instance import TorchInstance
from modelserver_backends.pytorch.options import TorchOptions
from modelserver_backends.pytorch.program import Program
from support.contexts import context_of, tensors
from support.fake_torch_cuda import FakeGpu, array_over

from modelserver.backend import Datatype, DeviceArray, InternalError, ModelConfig, UnavailableError
from modelserver.config.schema import ModelInput, ModelOutput
from modelserver.planes.data import DataPlane
from modelserver.platform import device_loss


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    fake = FakeGpu()
    fake.install(monkeypatch)
    with fake:
        yield fake


def doubled(values: torch.Tensor) -> torch.Tensor:
    return values * 2


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_batch_is_waited_for_once_and_at_its_end(gpu: FakeGpu, is_pinned: bool) -> None:
    lane = CudaLane("cuda:0", is_pinned=is_pinned)
    host = torch.arange(6.0).view(2, 3)
    with lane.open():
        given = lane.upload(host)
        result = doubled(given)
        assert gpu.is_on_device(result)
        assert result.isnan().all()
        assert gpu.num_waits == 0
        copies = lane.download([result, torch.ones(2)])
    assert gpu.num_waits == 1
    assert torch.equal(copies[0], host * 2)
    assert torch.equal(copies[1], torch.ones(2))
    assert not gpu.is_on_device(copies[0])


def test_inputs_may_be_written_again_once_they_are_uploaded(gpu: FakeGpu) -> None:
    """The server gives an array's memory back before the device has read it."""
    lane = CudaLane("cuda:0", is_pinned=True)
    host = torch.ones(4)
    with lane.open():
        result = doubled(lane.upload(host))
        host.zero_()
        (copy,) = lane.download([result])
    assert copy.tolist() == [2.0] * 4


def test_shapes_that_come_again_are_replayed_with_their_own_values(gpu: FakeGpu) -> None:
    lane = CudaLane("cuda:0", is_pinned=True)
    call = lane.graphed(doubled)
    held = []
    for number in range(5):
        host = torch.full((3,), float(number))
        with lane.open():
            (copy,) = lane.download([call(lane.upload(host))])
        held.append(copy)
    # The first time nothing is known of them, the second time they are captured.
    assert [graph.num_replays for graph in gpu.graphs] == [4]
    assert [copy.tolist() for copy in held] == [[2.0 * number] * 3 for number in range(5)]


def test_a_program_that_no_graph_can_hold_goes_on_without(gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    def call_that_waits(values: torch.Tensor) -> torch.Tensor:
        if gpu.is_capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return doubled(values)

    lane = CudaLane("cuda:0", is_pinned=True)
    call = lane.graphed(call_that_waits)
    for number in range(4):
        with lane.open():
            (copy,) = lane.download([call(lane.upload(torch.full((3,), float(number))))])
        assert copy.tolist() == [2.0 * number] * 3
    assert caplog.text.count("without CUDA graphs: operation not permitted") == 1


def test_graphs_are_bounded(gpu: FakeGpu) -> None:
    lane = CudaLane("cuda:0", is_pinned=True)
    call = lane.graphed(doubled)
    for size in range(1, MAX_GRAPHS + 4):
        for _ in range(2):
            with lane.open():
                (copy,) = lane.download([call(lane.upload(torch.ones(size)))])
            assert copy.tolist() == [2.0] * size
    assert len(gpu.graphs) == MAX_GRAPHS


def test_what_a_program_refuses_does_not_end_the_graphs_of_others(gpu: FakeGpu) -> None:
    def of_three(values: torch.Tensor) -> torch.Tensor:
        if len(values) != 3:
            raise RuntimeError("expected three values")
        return doubled(values)

    lane = CudaLane("cuda:0", is_pinned=True)
    call = lane.graphed(of_three)
    for size in (2, 2, 3, 3, 3):
        with suppress(RuntimeError), lane.open():
            lane.download([call(lane.upload(torch.ones(size)))])
    assert [graph.num_replays for graph in gpu.graphs] == [2]


def test_an_optional_input_and_texts_are_no_tensors_of_a_graph(gpu: FakeGpu) -> None:
    def call(values: torch.Tensor, bias: torch.Tensor | None, texts: list[str] | None = None) -> torch.Tensor:
        return values * len(texts or "12") if bias is None else values + bias

    lane = CudaLane("cuda:0", is_pinned=True)
    graphed = lane.graphed(call)
    answers = []
    for bias in (None, None, 5.0, 5.0, None):
        with lane.open():
            given = lane.upload(torch.ones(2)), None if bias is None else lane.upload(torch.full((2,), bias))
            answers.append(lane.download([graphed(*given)])[0].tolist())
    assert answers == [[2, 2], [2, 2], [6, 6], [6, 6], [2, 2]]
    assert [graph.num_replays for graph in gpu.graphs] == [2, 1]
    for texts in (["a"], ["a"], ["a", "b", "c"]):
        with lane.open():
            (copy,) = lane.download([graphed(lane.upload(torch.ones(2)), None, texts)])
        assert copy.tolist() == [len(texts)] * 2


def test_weights_are_read_after_what_was_queued_when_they_were_loaded(gpu: FakeGpu) -> None:
    """Another memory format of weights is a kernel on the stream of the thread that loads."""
    weight = gpu.on_device(torch.ones(2))
    with gpu.current(gpu.default):
        weight.copy_(gpu.on_device(torch.full((2,), 3.0)), non_blocking=True)
    lane = CudaLane("cuda:0", is_pinned=True)
    with lane.open():
        (copy,) = lane.download([lane.upload(torch.ones(2)) * weight])
    assert copy.tolist() == [3, 3]


def instance_of(tmp_path: Path, call: Callable[[torch.Tensor], object]) -> TorchInstance:
    config = ModelConfig(
        input=tensors(ModelInput, x=(Datatype.FP32, (-1,))), output=tensors(ModelOutput, y=(Datatype.FP32, (-1,)))
    )
    arguments: object = None
    return TorchInstance(
        Program(call, arguments),  # type: ignore[arg-type]
        InputBinding(("x",)),
        context_of(tmp_path, config=config),
        TorchOptions(),
        device="cuda:0",
    )


def test_lent_memory_is_read_no_more_when_a_batch_has_failed(gpu: FakeGpu, tmp_path: Path) -> None:
    """The client may write there, or unmap it, as soon as it has the answer."""
    held = []

    def call(values: torch.Tensor) -> object:
        held.append(values * 2)
        return "no tensor"

    made, given = instance_of(tmp_path, call), np.full(4, 1.0, np.float32)
    with pytest.raises(InternalError, match="instead of tensors"):
        made.run_on_device({"x": array_over(given)}, {})
    given[:] = 9
    assert held[0].tolist() == [2.0] * 4
    assert gpu.num_waits == 1


@pytest.mark.parametrize("is_late", [False, True])
def test_a_batch_for_which_memory_is_out_is_refused_and_the_next_one_is_answered(
    gpu: FakeGpu, tmp_path: Path, is_late: bool
) -> None:
    """Where a pinned buffer or a copy has no place, too."""
    left = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")]

    def call(values: torch.Tensor) -> torch.Tensor:
        if is_late:
            gpu.fault = left.pop() if left else None
        elif left:
            raise left.pop()
        return doubled(values)

    made = instance_of(tmp_path, call)
    with pytest.raises(UnavailableError, match=r"too little free memory.*Tried to allocate 20.00 GiB") as caught:
        made.run({"x": np.ones(2, np.float32)})
    assert caught.value.__cause__ is not None
    assert caught.value.__cause__.__traceback__ is None, "frames keep the tensors of the batch"
    gpu.fault = None
    assert made.run({"x": np.ones(2, np.float32)})["y"].tolist() == [2, 2]
    assert made.is_ready()


def test_an_instance_on_a_lost_gpu_is_not_ready_and_its_server_not_live(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_loss._Loss, "reason", "")
    made = instance_of(tmp_path, doubled)
    gpu.fault = RuntimeError(
        "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
    )
    with pytest.raises(InternalError, match=r"^PyTorch failed: CUDA error: device-side assert triggered$"):
        made.run({"x": np.ones(2, np.float32)})
    assert not made.is_ready()
    plane = DataPlane.__new__(DataPlane)
    plane.is_shutting_down = False
    assert not plane.is_live
    assert not plane.is_ready
    assert plane.unready_because() == ["this process has lost its GPU (device-side assert triggered): start it again"]


@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("datatype", [Datatype.FP32, Datatype.BF16])
def test_registered_memory_is_read_and_written_where_it_lies(
    gpu: FakeGpu, tmp_path: Path, datatype: Datatype, has_graphs: bool
) -> None:
    config = ModelConfig(
        input=tensors(ModelInput, x=(datatype, (-1,))), output=tensors(ModelOutput, y=(datatype, (-1,)))
    )
    arguments: object = None  # what a program takes is known by its binding
    made = TorchInstance(
        Program(doubled, arguments),  # type: ignore[arg-type]
        InputBinding(("x",)),
        context_of(tmp_path, config=config),
        TorchOptions(has_cuda_graphs=has_graphs),
        device="cuda:0",
    )
    assert made.gpu == 0
    one = 0x3F80 if datatype is Datatype.BF16 else 1.0
    two = 0x4000 if datatype is Datatype.BF16 else 2.0
    given, place = np.full(4, one, datatype.numpy), np.zeros(256, np.uint8)
    for run in range(3):
        place[:] = 0
        before = gpu.num_waits
        out = made.run_on_device({"x": array_over(given)}, {"y": array_over(place)})["y"]
        # A capture waits too, once, before the stream is recorded.
        assert gpu.num_waits - before == (2 if has_graphs and run == 1 else 1)
        assert isinstance(out, DeviceArray)
        assert (out.address, out.shape, out.dtype) == (place.ctypes.data, (4,), datatype.numpy)
        assert place.view(datatype.numpy)[:4].tolist() == [two] * 4
    # What is too large for its place is an array, and nothing is written.
    place[:] = 7
    larger = np.full(200, one, datatype.numpy)
    found = made.run_on_device({"x": array_over(larger)}, {"y": array_over(place)})["y"]
    assert np.asarray(found).tolist() == [two] * 200
    assert (place == 7).all()
