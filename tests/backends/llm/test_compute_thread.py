"""What a thread that computes for a model is set to first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.compute_thread import ComputeThread, choose_num_threads
from modelserver_backends.llm.options import EngineOptions

CPU = torch.device("cpu")


def test_the_thread_uses_the_gpu_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins with the first GPU, whichever the network lies on."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1].index if chosen else 0)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    ComputeThread(CPU, None).settle()
    assert not chosen
    thread = ComputeThread(torch.device("cuda:1"), None)
    thread.settle()
    thread.settle()
    assert chosen == [torch.device("cuda:1")]


def test_the_thread_computes_with_as_many_as_were_chosen() -> None:
    before = torch.get_num_threads()
    try:
        ComputeThread(CPU, 3).settle()
        assert torch.get_num_threads() == 3
        ComputeThread(CPU, None).settle()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("num_bytes", "device", "options", "expected"),
    [
        (1 << 20, CPU, EngineOptions(), 1),
        (1 << 27, CPU, EngineOptions(), None),
        (1 << 20, CPU, EngineOptions(num_threads=2), 2),
        (1 << 20, torch.device("cuda:0"), EngineOptions(), None),
        (1 << 27, CPU, EngineOptions(tensor_parallel_size=1 << 20), 1),
    ],
)
def test_small_checkpoints_have_one_thread(
    tmp_path: Path, num_bytes: int, device: torch.device, options: EngineOptions, expected: int | None
) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(num_bytes)
    assert choose_num_threads(open_checkpoint(tmp_path), device, options) == expected
