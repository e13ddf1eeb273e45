"""Configs and requests for schedulers and instances: one FP32 input `IN`, one output `OUT`, and variants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from modelserver.backend import Backend, BackendContext
from modelserver.config.schema import (
    InstanceGroupKind,
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
)
from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.tensor import Tensor
from modelserver.execution.model import Model


def batching_config(
    max_batch_size: int = 8,
    *,
    dims: tuple[int, ...] = (-1,),
    count: int = 1,
    dynamic_batching: ModelDynamicBatching | None = None,
    **fields: Any,
) -> ModelConfig:
    return ModelConfig(
        **{
            "name": "m",
            "backend": "test",
            "max_batch_size": max_batch_size,
            "input": (ModelInput("IN", Datatype.FP32, dims=dims),),
            "output": (ModelOutput("OUT", Datatype.FP32, dims=dims),),
            "instance_group": (ModelInstanceGroup("m_0", InstanceGroupKind.KIND_CPU, count),),
            "dynamic_batching": dynamic_batching,
            **fields,
        }
    )


def tensor(name: str, data: Any) -> Tensor:
    array = np.asarray(data)
    return Tensor(name, Datatype.from_numpy(array.dtype), array)


def request(rows: int = 1, width: int = 1, *, value: float = 0.0, **fields: Any) -> InFlightRequest:
    data = np.full((rows, width), value, np.float32)
    return InFlightRequest(model_name="m", version=None, inputs={"IN": tensor("IN", data)}, rows=rows, **fields)


def load_model(
    backend: type[Backend], config: ModelConfig, loop: Any, directory: Path = Path(), **fields: Any
) -> Model:
    """Blocking: call it by `await asyncio.to_thread(...)`."""
    context = BackendContext(config.name, 1, config, directory, directory)
    return Model.load(backend, context, loop=loop, **fields)
