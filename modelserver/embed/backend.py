"""The backend `function`: models that are functions or classes of a Python program.

The program registers them by the version directory that stands for them (`FUNCTIONS`). With `instance_in_process` the
child imports them from the file `function.json`, which says where they were defined.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import runpy
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelserver.backend import (
    Answers,
    Array,
    Backend,
    BackendContext,
    BatchInstance,
    CancelledError,
    InferRequest,
    InferResponse,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    Placement,
    ResponseSender,
    ServerError,
    Tensor,
    TensorInstance,
)
from modelserver.embed.signature import Signature, Value, read_signature

logger = logging.getLogger(__name__)

RECIPE = "function.json"
# How many coroutines of one instance run at the same time; further requests wait for them.
MAX_COROUTINES = 256


class Model:
    """A model as a class: one object for each instance. Its own method `predict` is the function, with annotations.

    Where `predict` is a coroutine, `load` and `unload` may be too, on the same event loop.
    """

    def load(self, placement: Placement) -> None:
        """Read weights. `placement` says on which device the instance is. Called once, on a thread of the server."""

    def unload(self) -> None:
        """Free what `load` took."""


@dataclass(frozen=True, slots=True)
class Served:
    """What is served: a function, or a class of which each instance of the model makes an object.

    `is_factory`: the target is called for each instance as a class is.
    """

    target: Any
    signature: Signature
    is_factory: bool = False

    @classmethod
    def of(
        cls, target: Any, *, inputs: Mapping[str, Any] | None = None, outputs: Mapping[str, Any] | None = None
    ) -> Served:
        """Raises ConfigError for annotations that are missing or not understood, InvalidArgumentError otherwise."""
        if not callable(target):
            raise InvalidArgumentError(f"expected a function or a class, got {type(target).__name__}")
        return cls(target, read_signature(_method(target), inputs=inputs, outputs=outputs), isinstance(target, type))

    def make(self, placement: Placement) -> tuple[Callable[..., Any], Callable[[], Any], Any]:
        """The function of one instance, what ends it, and what its `load` returned: a coroutine, if it is one."""
        if not self.is_factory:
            return self.target, _nothing, None
        made = self.target()
        loading = made.load(placement) if hasattr(made, "load") else None
        return getattr(made, "predict", made), getattr(made, "unload", _nothing), loading


def _nothing() -> None:
    """The end of a function."""


def _method(target: Any) -> Any:
    """The method or function whose annotations count; a class's without `self`."""
    if not isinstance(target, type):
        return target if inspect.isroutine(target) else target.__call__
    for name in ("predict", "__call__"):
        if any(name in vars(base) for base in target.__mro__):
            return _Unbound(getattr(target, name))
    raise InvalidArgumentError(f"class {target.__name__} has no method predict, which would answer requests")


class _Unbound:
    """A method as its objects have it, so that its signature lacks `self`, without making an object."""

    def __new__(cls, method: Any) -> Any:
        return method.__get__(object(), object)


# What the program serves, by version directory.
FUNCTIONS: dict[Path, Served] = {}


class FunctionBackend(Backend):
    """Serves what the program has registered for the model's version directory."""

    option_names = frozenset[str]()
    supports_gpu = True

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._served: Served | None = None
        self.can_run_inline = True

    def load(self) -> None:
        directory = self.context.version_directory
        self._served = FUNCTIONS.get(directory) or _imported(directory)

    def create_instance(self, placement: Placement) -> BatchInstance | TensorInstance:
        served = self._served
        assert served is not None, "loaded before"
        call, close, loading = served.make(placement)
        name = self.context.model_name
        if served.signature.is_async:
            return CoroutineInstance(name, served.signature, call, close, loading)
        if served.signature.is_stream:
            return StreamInstance(name, served.signature, call, close)
        if served.signature.gathers:
            return GatheringInstance(name, served.signature, call, close)
        if self.context.config.max_batch_size:
            return BatchedInstance(name, served.signature, call, close)
        return SingleInstance(name, served.signature, call, close)


BACKEND = FunctionBackend


def recipe_of(target: Any, *, inputs: object = None, outputs: object = None) -> dict[str, Any]:
    """Where another process finds a function or class. Raises InvalidArgumentError if it cannot."""
    module, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", "")
    file = getattr(sys.modules.get(module), "__file__", None)
    if not file or "<" in name or inputs is not None or outputs is not None:
        raise InvalidArgumentError(
            f"{name or target!r} cannot run in a process of its own (place='process'): the process imports it by name, "
            "so it must stand at the top of a file, with its inputs and outputs as annotations"
        )
    return {"module": module, "file": str(Path(file).resolve()), "name": name, "path": sys.path}


def _imported(directory: Path) -> Served:
    """In a child process: the function that `function.json` describes."""
    try:
        recipe = json.loads((directory / RECIPE).read_text())
    except OSError:
        raise NotFoundError(
            f"no function is registered for {directory}: models of the backend 'function' belong to a Python program "
            "(modelserver.Server)"
        ) from None
    sys.path += [entry for entry in recipe["path"] if entry not in sys.path]
    if recipe["module"] == "__main__":
        found: Any = runpy.run_path(recipe["file"], run_name="__mp_main__")
    else:
        found = vars(importlib.import_module(recipe["module"]))
    first, *rest = recipe["name"].split(".")
    target = found.get(first)
    for part in rest:
        target = getattr(target, part, None)
    if target is None:
        raise NotFoundError(f"{recipe['file']} has no {recipe['name']} when it is imported by another process")
    return Served.of(target)


class _Calls:
    """What all instances share: the function's arguments from a request, and errors that say whose they are."""

    def __init__(self, name: str, signature: Signature, call: Callable[..., Any], close: Callable[[], Any]) -> None:
        self._name = name
        self._signature = signature
        self._call = call
        self._close = close

    def close(self) -> None:
        self._close()

    def _arguments(self, request: InferRequest) -> dict[str, Any]:
        """Raises InvalidArgumentError for an element that the function's type cannot hold."""
        arguments: dict[str, Any] = {}
        for value in self._signature.inputs:
            tensor = request.inputs.get(value.name)
            if tensor is not None:
                arguments[value.name] = self._read(value, tensor.data)
        if self._signature.request_name:
            arguments[self._signature.request_name] = request
        return arguments

    def _read(self, value: Value, data: Array) -> Any:
        try:
            return value.read(data)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"input '{value.name}' of model '{self._name}': {error.message}") from error

    def _response(self, result: Any) -> InferResponse:
        if self._signature.is_open and isinstance(result, InferResponse):
            return result
        datatypes = {value.name: value.datatype for value in self._signature.outputs}
        results = self._signature.results(result)
        return InferResponse([Tensor(name, datatypes[name], data) for name, data in results.items()])


class SingleInstance(_Calls, BatchInstance):
    """A function that is called once for each request."""

    def execute(self, requests: Sequence[InferRequest]) -> list[InferResponse | ServerError]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: InferRequest) -> InferResponse | ServerError:
        try:
            return self._response(self._call(**self._arguments(request)))
        except ServerError as error:
            return error


class BatchedInstance(_Calls, TensorInstance):
    """A function that is called once for a batch, with arrays whose first dimension is the batch."""

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        return self._signature.results(self._call(**inputs))


@dataclass(frozen=True, slots=True)
class Gathered:
    """One of the requests of a call, and its arguments."""

    request: InferRequest
    arguments: dict[str, Any]


class GatheringInstance(_Calls, BatchInstance):
    """A function that is called once with all requests of a batch, and returns a result or an error for each."""

    def execute(self, requests: Sequence[InferRequest]) -> list[InferResponse | ServerError]:
        answers: dict[int, InferResponse | ServerError] = {}
        gathered: dict[int, Gathered] = {}
        for number, request in enumerate(requests):
            try:
                gathered[number] = Gathered(request, self._arguments(request))
            except ServerError as error:
                answers[number] = error
        results = list(self._call(list(gathered.values()))) if gathered else []
        if len(results) != len(gathered):
            raise InternalError(f"the function returned {len(results)} results for {len(gathered)} requests")
        for number, result in zip(gathered, results, strict=True):
            answers[number] = result if isinstance(result, ServerError) else self._response(result)
        return [answers[number] for number in range(len(requests))]


class StreamInstance(_Calls, BatchInstance):
    """A generator: each value is a response. One request at a time."""

    answers_later = True

    def execute(self, requests: Sequence[InferRequest]) -> Answers:
        for request in requests:
            sender = request.sender
            try:
                values = self._call(**self._arguments(request))
                try:
                    for value in values:
                        if request.is_cancelled:
                            raise CancelledError("the client has left")
                        sender.send(self._response(value))
                finally:
                    if hasattr(values, "close"):
                        values.close()
                sender.finish()
            except ServerError as error:
                sender.finish(error)
        return None


class CoroutineInstance(_Calls, BatchInstance):
    """An async function or generator: its requests run at the same time, on an event loop of the instance."""

    answers_later = True

    def __init__(
        self, name: str, signature: Signature, call: Callable[..., Any], close: Callable[[], Any], loading: Any = None
    ) -> None:
        """`loading` is awaited first, if it is a coroutine. Raises what it raises."""
        super().__init__(name, signature, call, close)
        self._loop = asyncio.new_event_loop()
        self._room = asyncio.Semaphore(MAX_COROUTINES)
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{name}-coroutines", daemon=True)
        self._thread.start()
        if inspect.iscoroutine(loading):
            try:
                self._wait(loading)
            except BaseException:
                self._stop()
                raise

    def execute(self, requests: Sequence[InferRequest]) -> Answers:
        for request in requests:
            self._loop.call_soon_threadsafe(self._begin, request, request.sender)
        return None

    def close(self) -> None:
        self._wait(self._cancel())
        try:
            closing = self._close()
            if inspect.iscoroutine(closing):
                self._wait(closing)
        finally:
            self._stop()

    def _wait(self, work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _begin(self, request: InferRequest, sender: ResponseSender) -> None:
        has_room = asyncio.Event()
        task = self._loop.create_task(self._answer(request, sender, has_room))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def call(function: Callable[[], object]) -> None:
            with suppress(RuntimeError):  # the instance is closed
                self._loop.call_soon_threadsafe(function)

        sender.watch(on_cancel=lambda: call(task.cancel), on_room=lambda: call(has_room.set))

    async def _answer(self, request: InferRequest, sender: ResponseSender, has_room: asyncio.Event) -> None:
        try:
            async with self._room:
                await self._run(request, sender, has_room)
        except asyncio.CancelledError:
            error: ServerError = CancelledError("the client has left, or the model was unloaded")
        except ServerError as own:
            error = own
        except Exception as failure:
            logger.exception("model '%s' failed", self._name)
            error = InternalError(f"model '{self._name}' failed: {type(failure).__name__}: {failure}")
        else:
            return
        with suppress(ServerError):  # the server has ended the request
            sender.finish(error)

    async def _run(self, request: InferRequest, sender: ResponseSender, has_room: asyncio.Event) -> None:
        result = self._call(**self._arguments(request))
        if not self._signature.is_stream:
            sender.finish(self._response(await result))
            return
        async with aclosing(result) as values:
            async for value in values:
                while not sender.has_room:
                    has_room.clear()
                    if not sender.has_room:
                        await has_room.wait()
                sender.send(self._response(value), wait=False)
        sender.finish()

    async def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
