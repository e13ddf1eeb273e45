"""A server inside a Python program: its models are functions and classes, its clients may be the program itself.

server = Server(http_port=8000)

@server.model("double", max_batch_size=64)
def double(x: Tensor["FP32", -1, 3]) -> {"y": Tensor["FP32", -1, 3]}:
    return {"y": x * 2}

with server:                                          # or server.run(), or: modelserver serve app.py:server
    server.infer("double", x=np.ones((1, 3), "f4"))["y"]
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import shutil
import sys
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from modelserver.backend import Array, InternalError, InvalidArgumentError, NotFoundError
from modelserver.backend.model_files import backend_for_model_file
from modelserver.config.message import config_from_json
from modelserver.config.pbtxt import config_text
from modelserver.core.request import InFlightRequest
from modelserver.core.response import ParameterValue, ResponseStream
from modelserver.embed.backend import FUNCTIONS, RECIPE, Served
from modelserver.embed.model import Added, FileModel
from modelserver.embed.values import tensors_of, values_of
from modelserver.options.server_options import ServerOptions
from modelserver.planes.authorized import ask, only

if TYPE_CHECKING:
    from modelserver.api import ApiFactory
    from modelserver.app.server import Server as RunningServer

Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")

START_TIMEOUT_S = 600.0
STOP_GRACE_S = 10.0
_NOT_RUNNING = "the server is not running: use it as 'with server:', or call start()"


class Server:
    """Serves functions, classes and model repositories. Made once; started and stopped any number of times.

    `repository` is a model repository, a model's file or directory, or several. With `ports=False` the models are
    reached by `infer` alone. `apis` are factories of HTTP APIs by name (modelserver.api). `options` are the flags of
    `modelserver serve` by their names (`http_port=8000`). Raises InvalidArgumentError for an option that does not exist
    or has a bad value.
    """

    def __init__(
        self,
        repository: str | Path | Sequence[str | Path] = (),
        *,
        ports: bool = True,
        apis: Mapping[str, ApiFactory] | None = None,
        **options: Any,
    ) -> None:
        paths = [repository] if isinstance(repository, str | Path) else list(repository)
        known = {field.name for field in fields(ServerOptions)}
        if unknown := [name for name in options if name not in known]:
            raise InvalidArgumentError(
                f"Server has no option '{unknown[0]}'; its options are the flags of 'modelserver serve', with _ for -"
            )
        closed = {} if ports else {"allow_http": False, "allow_grpc": False, "allow_metrics": False}
        # The options that the program gives; flags of a command line win over them.
        self.options = closed | options | {"model_repository": tuple(map(str, paths))}
        self._options = ServerOptions(**self.options)
        self._models: dict[tuple[str, int], Added] = {}
        self._files: dict[str, FileModel] = {}
        self._apis = dict(apis or {})
        self._directory: Path | None = None
        self._numbers = itertools.count(1)
        self._running: RunningServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # Models.

    def model(self, name: str, **settings: Any) -> Callable[[Function], Function]:
        """Decorate a function or a class, which stays what it is, to serve it under this name. See `add`."""

        def decorate(function: Function) -> Function:
            self.add(name, function, **settings)
            return function

        return decorate

    def add(
        self,
        name: str,
        target: Callable[..., Any] | Served,
        *,
        version: int = 1,
        max_batch_size: int = 0,
        max_delay_ms: float = 0.0,
        instances: int = 1,
        place: str = "thread",
        inputs: Mapping[str, Any] | None = None,
        outputs: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Serve a function or a class; replaces a model of the same name and version, also of a running server.

        With a `max_batch_size` the function gets arrays with a batch dimension in front, and must return such;
        `max_delay_ms` is how long a batch waits for more requests. `place` is "thread", "loop" (the event loop, for
        functions of microseconds), "process", or a GPU such as "cuda:0". `inputs` and `outputs` are annotations by name
        for functions that have none. `config` are further fields of the model's config, as in its JSON form.

        Raises ConfigError for annotations that are missing or not understood, and InvalidArgumentError for settings
        that contradict each other; of a running server, what the load raises.
        """
        added = Added.of(
            name,
            target,
            max_batch_size=max_batch_size,
            max_delay_ms=max_delay_ms,
            instances=instances,
            place=place,
            inputs=inputs,
            outputs=outputs,
            config=config,
        )
        self._models[name, version] = added
        if self._directory is not None:
            self._write(name, version, added)
            if self._running is not None:
                self._wait(self._running.repository.reload(name))

    def add_file(
        self, name: str, path: str | Path, *, backend: str = "", config: Mapping[str, Any] | None = None
    ) -> None:
        """Serve a model's file or directory under this name. Before the server starts.

        `backend` is what serves it, "" for what its name and content say. `config` are further fields of its config, as
        in its JSON form. Raises InvalidArgumentError for a file of no known kind, NotFoundError if there is none.
        """
        place = Path(path).resolve()
        if not place.exists():
            raise NotFoundError(f"model '{name}': there is nothing at {path}")
        document: dict[str, Any] = {"name": name}
        if backend or place.is_file():
            document["backend"] = backend or backend_for_model_file(place)
        if place.is_file():
            document["default_model_filename"] = place.name
        self._files[name] = FileModel(
            place, config_from_json(json.dumps({**document, **(config or {})}), source=f"model '{name}'")
        )

    def model_config(self, name: str) -> str:
        """The config.pbtxt of a model that was added. KeyError if there is none of that name."""
        return config_text(self._models[self._newest(name)].config)

    # Life.

    def start(self) -> Self:
        """Serve in a thread of its own; returns when all models are loaded.

        Raises ServerError if a port is taken, or if a model that was added cannot be loaded; then nothing is left.
        """
        if self._running is not None:
            return self
        options = self.prepare()
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._run_loop, args=(self._loop,), name="modelserver", daemon=True)
        self._thread.start()
        try:
            self._running = self._wait(self._begin(options), START_TIMEOUT_S)
            self._check_loaded()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Answer the requests that were received, unload the models and close the ports. Does nothing if stopped."""
        running, self._running = self._running, None
        try:
            if running is not None:
                patience_s = self._options.drain_delay_secs + self._options.exit_timeout_secs + STOP_GRACE_S
                self._wait(running.stop(), patience_s)
        finally:
            if self._loop is not None and self._thread is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(STOP_GRACE_S)
            self._loop = self._thread = None
            self.discard()

    @property
    def is_running(self) -> bool:
        """Whether it serves, after `start`."""
        return self._running is not None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, options: ServerOptions | None = None) -> None:
        """Serve in this thread until SIGINT or SIGTERM, as `modelserver serve` does. Main thread only.

        `options` replace the program's own. Raises SystemExit if the stop was forced or overran.
        """
        from modelserver.cli.foreground import run

        status = 1
        try:
            status = run(self.prepare(options), self._apis)
        finally:
            self.discard()
        if status:
            raise SystemExit(status)

    def prepare(self, options: ServerOptions | None = None) -> ServerOptions:
        """The options of a server with the added models, whose directory stands until `discard`.

        `options` are those to start from; without them the program's own.
        """
        options = options or self._options
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="modelserver-functions-")).resolve()
        for (name, version), added in self._models.items():
            self._write(name, version, added)
        for name, file in self._files.items():
            file.write(self._directory / name)
        return replace(options, model_repository=(*options.model_repository, str(self._directory)))

    def discard(self) -> None:
        """Remove what `prepare` made."""
        directory, self._directory = self._directory, None
        if directory is not None:
            for name, version in self._models:
                FUNCTIONS.pop(directory / name / str(version), None)
            shutil.rmtree(directory, ignore_errors=True)

    @property
    def http_url(self) -> str:
        """`host:port` of HTTP, as clients of KServe and Triton take it. Raises RuntimeError if it is not served."""
        return self._url("HTTP")

    @property
    def grpc_url(self) -> str:
        """`host:port` of gRPC. Raises RuntimeError if it is not served."""
        return self._url("gRPC")

    # Requests without a socket.

    def infer(
        self,
        model: str,
        *,
        version: int | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
        timeout_s: float | None = None,
        **inputs: Any,
    ) -> dict[str, Any]:
        """The outputs of a model that answers once, by name: through the same queue and batches as any request.

        Inputs are arrays, or values that arrays are made of; the batch dimension belongs to them. Outputs of models
        that were added have the types of their annotations, those of other models are arrays. Raises ServerError as
        the model or the server does, and TimeoutError.
        """
        future = self._submit(self._only(model, version, parameters, inputs))
        try:
            return future.result(timeout_s)
        finally:
            future.cancel()

    async def infer_async(
        self,
        model: str,
        *,
        version: int | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
        **inputs: Any,
    ) -> dict[str, Any]:
        """As `infer`, for any event loop. To cancel it cancels the request."""
        return await asyncio.wrap_future(self._submit(self._only(model, version, parameters, inputs)))

    def stream(
        self,
        model: str,
        *,
        version: int | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
        **inputs: Any,
    ) -> Iterator[dict[str, Any]]:
        """The outputs of each response of a model, as they come. To leave the loop cancels the request."""
        responses = self._responses(model, version, parameters, inputs)
        try:
            while True:
                try:
                    yield self._submit(anext(responses)).result()
                except StopAsyncIteration:
                    return
        finally:
            self._submit(responses.aclose()).result()

    def perform(self, work: Callable[[RunningServer], Coroutine[Any, Any, Result]]) -> Future[Result]:
        """Have a coroutine, which gets the running server with its planes, executed on the server's event loop.

        Raises RuntimeError if the server is not running.
        """
        running = self._running
        if running is None:
            raise RuntimeError(_NOT_RUNNING)
        return self._submit(work(running))

    # Implementation.

    def _write(self, name: str, version: int, added: Added) -> None:
        """The model's directory. Its file differs each time, so that a reload sees that the function is another."""
        assert self._directory is not None
        directory = self._directory / name / str(version)
        directory.mkdir(parents=True, exist_ok=True)
        FUNCTIONS[directory] = added.served
        newest = self._models[self._newest(name)]
        (directory.parent / "config.pbtxt").write_text(config_text(newest.config))
        (directory / RECIPE).write_text(json.dumps({**added.recipe, "number": next(self._numbers)}))

    def _newest(self, name: str) -> tuple[str, int]:
        versions = [version for known, version in self._models if known == name]
        if not versions:
            raise KeyError(f"no model '{name}' was added")
        return name, max(versions)

    async def _begin(self, options: ServerOptions) -> RunningServer:
        from modelserver.app.server import Server as RunningServer

        server = RunningServer(options, self._apis)
        await server.start()
        return server

    def _check_loaded(self) -> None:
        assert self._running is not None
        for row in self._running.repository.index():
            is_own = (row.name, row.version or 1) in self._models or row.name in self._files
            if row.reason and is_own and row.state.value == "UNAVAILABLE":
                raise InternalError(f"model '{row.name}' cannot be served: {row.reason}")

    @staticmethod
    def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    def _submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        if self._loop is None:
            work.close()
            raise RuntimeError(_NOT_RUNNING)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, Result], timeout_s: float | None = None) -> Result:
        return self._submit(work).result(timeout_s)

    async def _only(
        self,
        model: str,
        version: int | None,
        parameters: Mapping[str, ParameterValue] | None,
        inputs: Mapping[str, Any],
    ) -> dict[str, Any]:
        return await only(model, self._responses(model, version, parameters, inputs), "stream")

    async def _responses(
        self,
        model: str,
        version: int | None,
        parameters: Mapping[str, ParameterValue] | None,
        inputs: Mapping[str, Any],
    ) -> AsyncGenerator[dict[str, Any], None]:
        running = self._running
        assert running is not None, "checked by _submit"

        def make() -> InFlightRequest:
            config = running.dataplane.model_config(model, version)
            return InFlightRequest(
                model_name=model,
                version=version,
                inputs=tensors_of(config, inputs),
                parameters=parameters or {},
                stream=_Stream(),
            )

        async with contextlib.aclosing(ask(running.dataplane, make)) as responses:
            async for outputs in responses:
                yield values_of(outputs, self._readers(model, version))

    def _readers(self, model: str, version: int | None) -> Mapping[str, Callable[[Array], Any]]:
        """How the outputs of a model that was added become what its annotations say."""
        if not self._is_added(model):
            return {}
        added = self._models.get((model, version) if version else self._newest(model))
        return {} if added is None else {value.name: value.read for value in added.served.signature.outputs}

    def _is_added(self, name: str) -> bool:
        return any(known == name for known, _ in self._models)

    def _url(self, name: str) -> str:
        address = self._running.addresses.get(name) if self._running is not None else None
        if address is None:
            raise RuntimeError(f"{name} is not served: the server is not running, or runs without it")
        return address.rpartition("/")[2]


def import_server(place: str) -> Server:
    """The server that `FILE.py:NAME` names. Raises InvalidArgumentError if there is none, and what the file raises."""
    file, _, name = place.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise InvalidArgumentError(f"'{place}': there is no file {path}")
    sys.path.insert(0, str(path.resolve().parent))
    found = getattr(importlib.import_module(path.stem), name, None)
    if not isinstance(found, Server):
        what = "no such name" if found is None else f"a {type(found).__name__}"
        raise InvalidArgumentError(
            f"'{place}': expected {name} = modelserver.Server(...) at the top of the file, found {what}"
        )
    return found


class _Stream(ResponseStream):
    """Its reader says how far it is, so that a fast model waits for it."""

    __slots__ = ()

    reads_later = True


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
