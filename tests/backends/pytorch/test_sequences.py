"""A PyTorch file with states and controls: the server keeps the ones and makes the others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import torch
from modelserver_backends.pytorch import BACKEND
from support.batching import load_model, tensor
from support.torch_models import write_script
from torch import nn

from modelserver.config.pbtxt import parse_pbtxt
from modelserver.core.request import InFlightRequest

CONFIG = """
name: "sums" backend: "pytorch" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "total" data_type: TYPE_FP32 dims: [ 1 ] }
sequence_batching {
  oldest { }
  control_input { name: "start" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  state { input_name: "kept" output_name: "keep" data_type: TYPE_FP32 dims: [ 1 ] }
}
"""


class Summing(nn.Module):
    """The state is ignored where a sequence starts: 100 is added there instead."""

    def forward(self, x: torch.Tensor, start: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + torch.where(start > 0, torch.full_like(kept, 100.0), kept)
        return total, total


async def test_states_and_controls_reach_the_file(tmp_path: Path) -> None:
    write_script(tmp_path, Summing())
    config = parse_pbtxt(CONFIG).config
    model = await asyncio.to_thread(load_model, BACKEND, config, asyncio.get_running_loop(), tmp_path / "1")
    try:
        sums = []
        for sequence_id, value, is_start in ((1, 1, True), (2, 2, True), (1, 10, False), (2, 20, False)):
            inputs = {"x": tensor("x", np.full((1, 1), value, np.float32))}
            request = InFlightRequest(
                model_name="sums", version=None, inputs=inputs, sequence_id=sequence_id, sequence_start=is_start
            )
            response = await model.submit(request).only()
            assert [output.name for output in response.outputs] == ["total"]
            sums.append(response.outputs[0].data.item())
        assert sums == [101, 102, 111, 122]
    finally:
        model.stop()
        await asyncio.to_thread(model.close)
