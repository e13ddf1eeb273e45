"""Ensembles of models that a test answers itself: no thread, no loop, no clock but its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from support.manual_loop import ManualLoop

from modelserver.config.pbtxt import read_pbtxt
from modelserver.config.schema import (
    EnsembleStep,
    ModelConfig,
    ModelEnsembling,
    ModelInput,
    ModelOutput,
    ModelTransactionPolicy,
)
from modelserver.config.signature import ModelSignature
from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.core.tensor import Tensor
from modelserver.errors import ServerError
from modelserver.scheduling.ensemble import Binding, EnsembleScheduler
from modelserver.telemetry.statistics import ModelStatistics
from tests.support.manual_clock import ManualClock

Values = Mapping[str, Any]


def parse(text: str) -> ModelConfig:
    """A config; asserts that it is well-formed."""
    parsed = read_pbtxt(text, "config.pbtxt")
    assert not parsed.problems, parsed.problems
    return parsed.config


def model_config(
    name: str,
    inputs: Sequence[str] = ("X",),
    outputs: Sequence[str] = ("Y",),
    *,
    optional: Sequence[str] = (),
    is_decoupled: bool = False,
    datatype: Datatype = Datatype.INT32,
    dims: tuple[int, ...] = (-1,),
    max_batch_size: int = 0,
) -> ModelConfig:
    """The config of a model whose tensors are all alike."""
    return ModelConfig(
        name=name,
        backend="test",
        max_batch_size=max_batch_size,
        input=tuple(ModelInput(key, datatype, dims=dims, optional=key in optional) for key in inputs),
        output=tuple(ModelOutput(key, datatype, dims=dims) for key in outputs),
        model_transaction_policy=ModelTransactionPolicy(decoupled=is_decoupled),
    )


def step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str], version: int = -1) -> EnsembleStep:
    return EnsembleStep(model, version, dict(inputs), dict(outputs))


def ensemble_config(
    *steps: EnsembleStep,
    inputs: Sequence[str] = ("IN",),
    outputs: Sequence[str] = ("OUT",),
    bools: Sequence[str] = (),
    optional: Sequence[str] = (),
    max_inflight_requests: int = 0,
    max_batch_size: int = 0,
    dims: tuple[int, ...] = (-1,),
    limits: Mapping[str, str] | None = None,
    **conditions: str,
) -> ModelConfig:
    """An ensemble named "e"; `conditions` are by step: `step0="!FLAG"`, `limits` by the rest of a key: `0.retries`."""
    tensors = [(key, Datatype.INT32) for key in inputs] + [(key, Datatype.BOOL) for key in bools]
    return ModelConfig(
        name="e",
        platform="ensemble",
        max_batch_size=max_batch_size,
        input=tuple(ModelInput(key, datatype, dims=dims, optional=key in optional) for key, datatype in tensors),
        output=tuple(ModelOutput(key, Datatype.INT32, dims=dims) for key in outputs),
        parameters={
            **{f"step.{key.removeprefix('step')}.condition": value for key, value in conditions.items()},
            **{f"step.{key}": value for key, value in (limits or {}).items()},
        },
        ensemble_scheduling=ModelEnsembling(tuple(steps), max_inflight_requests),
    )


def tensor(name: str, value: Any) -> Tensor:
    """INT32 or BOOL, of one dimension at least."""
    array = np.atleast_1d(np.asarray(value))
    if array.dtype == np.bool_:
        return Tensor(name, Datatype.BOOL, array)
    return Tensor(name, Datatype.INT32, array.astype(np.int32, copy=False))


class StepDouble:
    """A model whose requests wait in `waiting` for the test, or are answered at once by `function`."""

    def __init__(self, config: ModelConfig, function: Callable[[dict[str, Any]], Values] | None = None) -> None:
        self.name = config.name
        self.version = 1
        self.config = config
        self.is_decoupled = config.is_decoupled
        self.signature = ModelSignature(config)
        self.function = function
        self.refusal: ServerError | None = None
        self.requests: list[InFlightRequest] = []
        self.waiting: list[InFlightRequest] = []
        self.num_holders = 0

    def infer(self, request: InFlightRequest) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.signature.check(request)
        self.requests.append(request)
        self.waiting.append(request)
        if self.function is not None:
            self.answer(**self.function({name: value.data for name, value in request.inputs.items()}))

    def answer(self, *, at: int = 0, is_final: bool = True, **outputs: Any) -> None:
        """Answer the request that waits at this place, with these outputs or none."""
        request = self.waiting.pop(at) if is_final else self.waiting[at]
        tensors = [tensor(name, value) for name, value in outputs.items()]
        request.stream.deliver(InferResponse(tensors, is_final=is_final))

    def note(self, *times_ns: int) -> None:
        """Say of the request that waits first when it was taken, had its inputs, had its outputs, and was done."""
        notes = self.waiting[0].trace
        assert notes is not None, "a step wants to know"
        notes.note_compute(*times_ns)

    def fail(self, error: ServerError, *, at: int = 0) -> None:
        self.waiting.pop(at).stream.deliver(InferResponse(error=error))

    def hold(self) -> None:
        self.num_holders += 1

    def release(self) -> None:
        self.num_holders -= 1
        assert self.num_holders >= 0


class SlowReader(ResponseStream):
    """A client that reads only when the test says so."""

    reads_later = True


class Ensemble:
    """A scheduler over doubles."""

    def __init__(self, config: ModelConfig, *models: StepDouble, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop` None: one of which only timers are used, which are the test's: `loop.run_timers`."""
        by_name = {model.name: model for model in models}
        steps = config.ensemble_scheduling.step if config.ensemble_scheduling is not None else ()
        self.models = [by_name[item.model_name] for item in steps]
        self.clock = ManualClock(1_000)
        self.statistics = ModelStatistics()
        self.loop = ManualLoop(self.clock)
        self.scheduler = EnsembleScheduler(
            config,
            loop=loop or self.loop,  # type: ignore[arg-type]  # it has what is used
            statistics=self.statistics,
            clock=self.clock,
        )
        self.config = config
        self.binding = Binding(config, self.models)
        self.scheduler.bind(self.binding)

    def request(self, *, stream: ResponseStream | None = None, **fields: Any) -> InFlightRequest:
        """A request; keywords in capitals are inputs, the others fields."""
        inputs = {name: tensor(name, value) for name, value in fields.items() if name.isupper() and value is not None}
        others = {name: value for name, value in fields.items() if not name.isupper()}
        return InFlightRequest(model_name="e", version=1, inputs=inputs, stream=stream or ResponseStream(), **others)

    def submit(self, **fields: Any) -> Collected:
        """Submit a request; what arrives for it."""
        request = self.request(**fields)
        collected = Collected(request)
        self.scheduler.submit(request)
        return collected

    def wait(self, seconds: float) -> None:
        """Let time pass, and what is due happen."""
        self.clock.advance_us(round(seconds * 1e6))
        self.loop.run_timers()

    def run(self, **fields: Any) -> dict[str, list[int]]:
        """The outputs of a request that is answered at once."""
        return self.submit(**fields).only


class Collected:
    """The responses of one request."""

    def __init__(self, request: InFlightRequest) -> None:
        self.request = request
        self.responses: list[InferResponse] = []
        request.stream.subscribe(self.responses.append)

    @property
    def only(self) -> dict[str, list[int]]:
        """The outputs of the one and final response."""
        [response] = self.responses
        assert response.is_final
        if response.error is not None:
            raise response.error
        return {output.name: output.data.tolist() for output in response.outputs}

    @property
    def error(self) -> ServerError:
        """The error that the request ended with."""
        assert [response.is_final for response in self.responses][-1]
        assert self.responses[-1].error is not None
        return self.responses[-1].error

    @property
    def values(self) -> list[tuple[dict[str, list[int]], bool]]:
        """Outputs of each response, and whether it is final."""
        return [
            ({output.name: output.data.tolist() for output in response.outputs}, response.is_final)
            for response in self.responses
        ]
