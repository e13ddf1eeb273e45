"""PyTriton's `Triton().bind`, its configs and decorators, for programs that were written for them.

A bound function gets a list of requests, mappings of inputs to arrays, and returns a list of results; the decorators
turn that into a function of arrays. Several functions in a list are the instances of the model.
"""

from __future__ import annotations

import enum
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from modelserver.backend import Array, InferRequest, ServerError
from modelserver.embed import signature
from modelserver.embed.backend import Gathered, Served
from modelserver.embed.foreign import program
from modelserver.embed.foreign.pytriton_decorators import (  # noqa: F401  # programs import all of them
    BOUND,
    ConstantPadder,
    PyTritonBadParameterError,
    PyTritonError,
    PyTritonInvalidOperationError,
    PyTritonRuntimeError,
    PyTritonUnrecoverableError,
    PyTritonValidationError,
    Request,
    TritonContext,
    batch,
    fill_optionals,
    first_value,
    group_by_keys,
    group_by_values,
    pad_batch,
    sample,
    triton_context,
)
from modelserver.embed.server import Server
from modelserver.embed.signature import Signature, value_of
from modelserver.options.server_options import ServerOptions


class DeviceKind(enum.Enum):
    KIND_AUTO = "KIND_AUTO"
    KIND_CPU = "KIND_CPU"
    KIND_GPU = "KIND_GPU"


class TimeoutAction(enum.Enum):
    REJECT = "REJECT"
    DELAY = "DELAY"


@dataclass
class QueuePolicy:
    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_microseconds: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


@dataclass
class DynamicBatcher:
    max_queue_delay_microseconds: int = 0
    preferred_batch_size: list[int] | None = None
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy | None = None
    priority_queue_policy: dict[int, QueuePolicy] | None = None


@dataclass
class ModelConfig:
    batching: bool = True
    max_batch_size: int = 4
    batcher: DynamicBatcher = field(default_factory=DynamicBatcher)
    response_cache: bool = False
    decoupled: bool = False
    model_warmup: list[Any] | None = None


@dataclass(frozen=True)
class Tensor:
    """An input or output; the batch dimension is not in its shape. `dtype` is a type of NumPy."""

    shape: tuple[int, ...]
    dtype: Any
    name: str | None = None
    optional: bool = False


class TritonConfig:
    """Flags of the server by their names. Of other names there are none."""

    def __init__(self, **flags: Any) -> None:
        known = inspect.signature(ServerOptions).parameters
        if unknown := [name for name in flags if name not in known]:
            raise PyTritonValidationError(f"modelserver has no flag '{unknown[0]}', which TritonConfig sets")
        given = {name: value for name, value in flags.items() if value is not None}
        self.options = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}


class Triton:
    """A server of bound functions; also a context manager, which stops it."""

    def __init__(self, *, config: TritonConfig | None = None, **_without_effect: Any) -> None:
        options: dict[str, Any] = (config or TritonConfig()).options
        self._server = Server(**options)

    def bind(
        self,
        model_name: str,
        infer_func: Callable[..., Any] | Sequence[Callable[..., Any]],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        model_version: int = 1,
        config: ModelConfig | None = None,
        strict: bool = False,  # noqa: ARG002  # results are always checked
        trace_config: Sequence[str] | None = None,  # noqa: ARG002  # a flag of the server
    ) -> None:
        """Serve a function, or a list of them as instances. Raises PyTritonValidationError for what is wrong."""
        functions = list(infer_func) if isinstance(infer_func, Sequence) else [infer_func]
        if not functions or not all(map(callable, functions)):
            raise PyTritonValidationError(f"model '{model_name}': expected a function or a list of functions")
        bound = _Bound(model_name, _named(inputs, "INPUT"), _named(outputs, "OUTPUT"), config or ModelConfig())
        try:
            self._server.add(
                model_name,
                bound.served(functions),
                version=model_version,
                max_batch_size=bound.config.max_batch_size if bound.config.batching else 0,
                instances=len(functions),
                config=bound.fields(),
            )
        except ServerError as error:
            raise PyTritonValidationError(error.message) from error

    def serve(self, monitoring_period_s: float = 10.0) -> None:  # noqa: ARG002  # nothing is polled
        """Serve until stopped."""
        program.serve(self._server)

    def run(self) -> None:
        """Serve in a thread."""
        self._server.start()

    def connect(self) -> None:
        self.run()

    def stop(self) -> bool:
        self._server.stop()
        return True

    def is_alive(self) -> bool:
        return self._server.is_running

    is_connected = is_alive

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _innermost(function: Any) -> Any:
    """The function below its decorators."""
    return inspect.unwrap(function if inspect.isroutine(function) else type(function).__call__)


def _named(tensors: Sequence[Tensor], kind: str) -> tuple[Tensor, ...]:
    if not tensors:
        raise PyTritonValidationError(f"a model needs at least one {kind.lower()}")
    return tuple(
        tensor if tensor.name else replace(tensor, name=f"{kind}_{number}") for number, tensor in enumerate(tensors, 1)
    )


class _Bound:
    """A bound model: its tensors and config, and how its functions are called."""

    def __init__(self, name: str, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], config: ModelConfig) -> None:
        self.name = name
        self.inputs = inputs
        self.outputs = outputs
        self.config = config

    @property
    def model_config(self) -> Self:
        """As PyTriton's context has it."""
        return self

    @property
    def max_batch_size(self) -> int:
        return self.config.max_batch_size

    def served(self, functions: Sequence[Callable[..., Any]]) -> Served:
        innermost = _innermost(functions[0])
        is_stream = inspect.isgeneratorfunction(innermost) or inspect.isasyncgenfunction(innermost)
        is_async = inspect.iscoroutinefunction(innermost) or inspect.isasyncgenfunction(innermost)
        if is_stream and not self.config.decoupled:
            raise PyTritonValidationError(f"model '{self.name}' is a generator: it needs ModelConfig(decoupled=True)")
        next_function = itertools.cycle(functions)
        kinds: dict[tuple[bool, bool], Callable[..., Any]]
        kinds = {(False, False): self._gather, (True, False): self._stream, (False, True): self._async}
        call = kinds.get((is_stream, is_async), self._async_stream)

        def make() -> Callable[..., Any]:
            return partial(call, next(next_function))

        return Served(
            make,
            Signature(
                tuple(map(_value, self.inputs)),
                tuple(map(_value, self.outputs)),
                returns_value=False,
                is_stream=is_stream,
                is_async=is_async,
                request_name="" if not (is_stream or is_async) else "_request",
                gathers=not (is_stream or is_async),
            ),
            is_factory=True,
        )

    def fields(self) -> dict[str, Any]:
        """The fields of the model's config beside its tensors."""
        if self.config.model_warmup:
            raise PyTritonValidationError(f"model '{self.name}': model_warmup is not taken; give it in config.pbtxt")
        found: dict[str, Any] = {}
        if self.config.response_cache:
            found["response_cache"] = {"enable": True}
        if self.config.decoupled:
            found["model_transaction_policy"] = {"decoupled": True}
        if self.config.batching:
            given = asdict(self.config.batcher, dict_factory=_json_fields)
            found["dynamic_batching"] = given
        return found

    def _gather(self, function: Callable[..., Any], gathered: Sequence[Gathered]) -> list[Any]:
        token = BOUND.set(self)
        try:
            results = function([_made(each.request, each.arguments) for each in gathered])
        finally:
            BOUND.reset(token)
        return [self._result(one) for one in results]

    def _stream(self, function: Callable[..., Any], *, _request: InferRequest, **arguments: Array) -> Iterator[Any]:
        token = BOUND.set(self)
        try:
            results = function([_made(_request, arguments)])
        finally:
            BOUND.reset(token)
        for result in results:
            yield self._result(result[0])

    async def _async(self, function: Callable[..., Any], *, _request: InferRequest, **arguments: Array) -> Any:
        BOUND.set(self)
        return self._result((await function([_made(_request, arguments)]))[0])

    async def _async_stream(self, function: Callable[..., Any], *, _request: InferRequest, **arguments: Array) -> Any:
        BOUND.set(self)
        async for result in function([_made(_request, arguments)]):
            yield self._result(result[0])

    def _result(self, result: Any) -> Any:
        """Outputs by name; a list or a tuple has them in their order."""
        if isinstance(result, Mapping | ServerError):
            return result
        if not isinstance(result, list | tuple) or len(result) != len(self.outputs):
            names = ", ".join(str(tensor.name) for tensor in self.outputs)
            raise PyTritonValidationError(f"model '{self.name}': expected the outputs {names}, got {type(result)}")
        return {str(tensor.name): value for tensor, value in zip(self.outputs, result, strict=True)}


def _json_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value.value if isinstance(value, enum.Enum) else value for name, value in pairs if value is not None}


def _value(tensor: Tensor) -> signature.Value:
    try:
        datatype = "BYTES" if tensor.dtype in (np.bytes_, np.object_, object, bytes) else tensor.dtype
        annotation = signature.Tensor(datatype, *tensor.shape)
        return value_of(f"tensor '{tensor.name}'", str(tensor.name), annotation, tensor.optional)
    except ServerError as error:
        raise PyTritonValidationError(f"tensor '{tensor.name}': {error.message}") from error


def _made(request: InferRequest, arguments: dict[str, Array]) -> Request:
    return Request(arguments, dict(request.parameters))
