"""An instance's way to its GPU, on one that computes only when it is waited for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from modelserver_backends.pytorch.cuda_lane import MAX_GRAPHS, CudaLane
from support.fake_torch_cuda import FakeGpu


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


def test_graphs_are_bounded(gpu: FakeGpu) -> None:
    lane = CudaLane("cuda:0", is_pinned=True)
    call = lane.graphed(doubled)
    for size in range(1, MAX_GRAPHS + 4):
        for _ in range(2):
            with lane.open():
                (copy,) = lane.download([call(lane.upload(torch.ones(size)))])
            assert copy.tolist() == [2.0] * size
    assert len(gpu.graphs) == MAX_GRAPHS
