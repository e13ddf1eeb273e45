"""PyTriton's `Triton().bind`, its configs and decorators, for programs that were written for them.

A bound function gets a list of requests, mappings of inputs to arrays, and returns a list of results; the decorators
turn that into a function of arrays. Several functions in a list are the instances of the model.
"""

from __future__ import annotations

import enum
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Self

import numpy as np

from modelserver.backend import Array, InferRequest, ServerError
from modelserver.embed import signature
from modelserver.embed.backend import Gathered, Served
from modelserver.embed.foreign import program
from modelserver.embed.server import Server
from modelserver.embed.signature import Signature, value_of
from modelserver.options.server_options import ServerOptions


class PyTritonError(Exception):
    """The base of PyTriton's exceptions."""


class PyTritonValidationError(PyTritonError):
    """A model's function or its config is wrong."""


class PyTritonUnrecoverableError(PyTritonError):
    """What a function raises when it can never answer again."""


PyTritonInvalidOperationError = PyTritonRuntimeError = PyTritonBadParameterError = PyTritonError


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


@dataclass
class Request(MutableMapping[str, Array]):
    """The inputs of a request by name, and its parameters."""

    data: dict[str, Array]
    parameters: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Array:
        return self.data[name]

    def __setitem__(self, name: str, value: Array) -> None:
        self.data[name] = value

    def __delitem__(self, name: str) -> None:
        del self.data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


@dataclass
class TritonContext:
    """What `triton_context` hands to a function: the config of the model."""

    model_config: Any


# The model whose function is being called.
_bound: ContextVar[_Bound] = ContextVar("_bound")


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
        token = _bound.set(self)
        try:
            results = function([_made(each.request, each.arguments) for each in gathered])
        finally:
            _bound.reset(token)
        return [self._result(one) for one in results]

    def _stream(self, function: Callable[..., Any], *, _request: InferRequest, **arguments: Array) -> Iterator[Any]:
        token = _bound.set(self)
        try:
            results = function([_made(_request, arguments)])
        finally:
            _bound.reset(token)
        for result in results:
            yield self._result(result[0])

    async def _async(self, function: Callable[..., Any], *, _request: InferRequest, **arguments: Array) -> Any:
        _bound.set(self)
        return self._result((await function([_made(_request, arguments)]))[0])

    async def _async_stream(self, function: Callable[..., Any], *, _request: InferRequest, **arguments: Array) -> Any:
        _bound.set(self)
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


# Decorators. Each gets the list of requests as the last argument, so that methods may have them, too.


def _decorator(transform: Callable[..., Any]) -> Callable[..., Any]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            return transform(lambda *last, **more: function(*arguments[:-1], *last, **named, **more), arguments[-1])

        return call

    return decorate


def _rows(request: Mapping[str, Array]) -> int:
    return int(next(iter(request.values())).shape[0])


def _by_generator(results: Any, each: Callable[[Any], Any]) -> Any:
    """`each` of a result, or of all results of a generator."""
    return (each(one) for one in results) if inspect.isgenerator(results) else each(results)


@_decorator
def sample(function: Callable[..., Any], requests: Sequence[Mapping[str, Array]]) -> Any:
    """The inputs of the only request, without a batch dimension, as named arguments."""
    return _by_generator(function(**requests[0]), lambda result: [result])


@_decorator
def batch(function: Callable[..., Any], requests: Sequence[Mapping[str, Array]]) -> Any:
    """The inputs of all requests in one batch, as named arguments; outputs are shared out again."""
    names = requests[0].keys()
    if any(request.keys() != names for request in requests):
        raise PyTritonValidationError("requests of one batch have different inputs: use group_by_keys before batch")
    sizes = [_rows(request) for request in requests]
    ends = list(itertools.accumulate(sizes))

    def share(result: Any) -> list[Any]:
        values = result.values() if isinstance(result, Mapping) else result
        wrong = [np.shape(value) for value in values if np.shape(value)[:1] != (ends[-1],)]
        if wrong:
            raise ValueError(f"an output has the shape {wrong[0]}: its first dimension should be {ends[-1]}, the batch")
        parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        if isinstance(result, Mapping):
            return [{name: value[part] for name, value in result.items()} for part in parts]
        return [[value[part] for value in result] for part in parts]

    return _by_generator(function(**{name: np.concatenate([one[name] for one in requests]) for name in names}), share)


@_decorator
def group_by_keys(function: Callable[..., Any], requests: Sequence[Mapping[str, Array]]) -> list[Any]:
    """Requests with the same inputs in one call."""
    return _grouped(function, requests, lambda request: frozenset(request.keys()))


def _grouped(function: Callable[..., Any], requests: Sequence[Any], key: Callable[[Any], Any]) -> list[Any]:
    groups: dict[Any, list[int]] = {}
    for number, request in enumerate(requests):
        groups.setdefault(key(request), []).append(number)
    results: list[Any] = [None] * len(requests)
    for numbers in groups.values():
        answers = function([requests[number] for number in numbers])
        for number, answer in zip(numbers, answers, strict=True):
            results[number] = answer
    return results


def group_by_values(*keys: str, pad_fn: Callable[[list[Any]], list[Any]] | None = None) -> Callable[..., Any]:
    """Rows whose inputs `keys` are equal in one call; `pad_fn` makes the results of one request fit together."""

    @_decorator
    def grouped(function: Callable[..., Any], requests: Sequence[Request]) -> list[Any]:
        parts: list[Request] = []
        rows: list[tuple[int, list[int]]] = []
        for number, request in enumerate(requests):
            by_value: dict[Any, list[int]] = {}
            for row in range(_rows(request)):
                by_value.setdefault(_key(request, keys, row), []).append(row)
            for own in by_value.values():
                data = {name: value[own] for name, value in request.items()}
                parts.append(Request(data, getattr(request, "parameters", {})))
                rows.append((number, own))
        answers = _grouped(function, parts, lambda part: _key(part, keys, 0))
        return [_joined(number, rows, answers, pad_fn) for number in range(len(requests))]

    return grouped


def _key(request: Mapping[str, Array], keys: Sequence[str], row: int) -> Any:
    return tuple(
        (name, request[name][row].shape, tuple(request[name][row].ravel().tolist())) for name in keys if name in request
    )


def _joined(number: int, rows: Sequence[tuple[int, list[int]]], answers: Sequence[Any], pad_fn: Any) -> Any:
    """The result of a request from those of its groups of rows, in the order of its rows."""
    own = [(order, answer) for (owner, order), answer in zip(rows, answers, strict=True) if owner == number]
    results = [answer for _, answer in own]
    if len(own) == 1:
        return results[0]
    results = pad_fn(results) if pad_fn is not None else results
    order = np.argsort(np.concatenate([rows_of_group for rows_of_group, _ in own]))
    if isinstance(results[0], Mapping):
        return {name: np.concatenate([one[name] for one in results])[order] for name in results[0]}
    return [np.concatenate(values)[order] for values in zip(*results, strict=True)]


class ConstantPadder:
    """Pads the outputs of groups to one shape."""

    def __init__(self, pad_value: Any = 0) -> None:
        self._value = pad_value

    def __call__(self, results: list[Any]) -> list[Any]:
        shapes = {
            name: np.max([one[name].shape[1:] for one in results], axis=0)
            for name in results[0]
            if results[0][name].ndim > 1
        }
        return [
            {name: self._padded(value, shapes[name]) if name in shapes else value for name, value in one.items()}
            for one in results
        ]

    def _padded(self, value: Array, shape: Any) -> Array:
        is_bytes = value.dtype.kind in "OSU"
        widths = [(0, 0), *((0, int(want - have)) for want, have in zip(shape, value.shape[1:], strict=True))]
        fill = b"" if is_bytes and self._value == 0 else self._value
        return np.pad(value.astype(object) if is_bytes else value, widths, constant_values=fill)


def fill_optionals(**defaults: Array) -> Callable[..., Any]:
    """Inputs that a request lacks, for each of its rows."""

    @_decorator
    def filled(function: Callable[..., Any], requests: Sequence[Request]) -> Any:
        batches = _bound.get().config.batching
        for request in requests:
            for name, default in defaults.items():
                if name not in request:
                    value = np.asarray(default)
                    request[name] = np.repeat(value[None], _rows(request), axis=0) if batches else value
        return function(requests)

    return filled


def first_value(*keys: str, squeeze_single_values: bool = True, strict: bool = True) -> Callable[..., Any]:
    """The first row of inputs `keys`, which have the same value in all rows."""

    def first(name: str, values: Array) -> Any:
        if strict and any(not np.array_equal(values[0], one) for one in values):
            raise PyTritonValidationError(f"the values of '{name}' differ in one batch: use group_by_values before")
        value = values[0]
        return value.reshape(-1)[0] if squeeze_single_values and np.size(value) == 1 else value

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            if arguments and isinstance(arguments[-1], list):
                requests = [{n: first(n, v) if n in keys else v for n, v in one.items()} for one in arguments[-1]]
                return function(*arguments[:-1], requests, **named)
            return function(*arguments, **{n: first(n, v) if n in keys else v for n, v in named.items()})

        return call

    return decorate


def pad_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Repeats the last row until the batch has a preferred size, or the largest."""

    @wraps(function)
    def call(*arguments: Any, **inputs: Any) -> Any:
        config = _bound.get().config
        arrays = {name: value for name, value in inputs.items() if isinstance(value, np.ndarray)}
        rows = _rows(arrays)
        sizes = sorted({*(config.batcher.preferred_batch_size or ()), config.max_batch_size})
        size = next((one for one in sizes if one >= rows), rows)
        padded = {
            name: np.concatenate([value, np.repeat(value[-1:], size - rows, axis=0)]) for name, value in arrays.items()
        }
        result = function(*arguments, **inputs | padded)
        if isinstance(result, Mapping):
            return {name: value[:rows] for name, value in result.items()}
        return [value[:rows] for value in result]

    return call


def triton_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the function the argument `triton_context`."""

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named, triton_context=TritonContext(_bound.get()))

    return call
