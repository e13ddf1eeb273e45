"""An instance's way to its GPU, on one that computes only when it is waited for."""

from __future__ import annotations

from collections.abc import Iterator
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

from modelserver.backend import Datatype, DeviceArray, ModelConfig
from modelserver.config.schema import ModelInput, ModelOutput


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
