"""The routes that change the model store: `/api/pull`, `push`, `create`, `copy`, `delete` and `blobs`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from modelserver.backend.discovery import bundled_module
from modelserver.config.modelfile import Modelfile, parse_modelfile
from modelserver.config.ollama_options import check_option, is_option, option_of_text
from modelserver.core.body_pipe import BodyPipe, PipedBody
from modelserver.core.tensor import Buffer
from modelserver.errors import InvalidArgumentError, NotFoundError, ServerError, UnavailableError, UnsupportedError
from modelserver.frontends.http.body import check_size
from modelserver.frontends.llm.edge import Call, LaterAnswers
from modelserver.frontends.llm.errors import Fault, ParameterError
from modelserver.frontends.llm.fields import Fields
from modelserver.frontends.ollama.requests import MAX_MESSAGES
from modelserver.planes.authorized import AnyControlPlane, AnyDataPlane
from modelserver.protocol.exchange import HttpExchange, HttpResponse
from modelserver.protocol.limits import HttpLimits
from modelserver.store.draft import Quantization, Recipe
from modelserver.store.names import ModelName, parse_name
from modelserver.store.store import Store
from modelserver.store.task import Progress, StoreTask

# Pulls, pushes and creations at one time; others wait.
_NUM_OPERATIONS = 4
_CHUNK_BYTES = 1 << 20
# Blobs that arrive at one time: those that are written, and all. Each may have a MB in memory.
_NUM_WRITTEN, _MAX_UPLOADS = 8, 32
_ROLES = ("system", "user", "assistant")
# As the language models' quantizer names them.
QUANTIZATIONS = ("q4_0", "q4_k_m", "q6_k", "q8_0")


class StoreRoutes:
    """Serves them. Whoever leaves ends the operation; what was downloaded stays, and the next pull goes on there."""

    def __init__(
        self, dataplane: AnyDataPlane, controlplane: AnyControlPlane, limits: HttpLimits, later: LaterAnswers
    ) -> None:
        self._dataplane = dataplane
        self._controlplane = controlplane
        self._limits = limits
        self._later = later
        self._pool = ThreadPoolExecutor(_NUM_OPERATIONS, thread_name_prefix="ollama-store")
        # Clients decide how long an upload takes: operations do not wait for them.
        self._uploading = ThreadPoolExecutor(_NUM_WRITTEN, thread_name_prefix="ollama-upload")
        self._num_uploads = 0

    # Operations that tell their progress.

    async def pull(self, call: Call) -> None:
        """Bring a model into the store. Raises ServerError for what goes wrong before the first report."""
        name = _name(call.fields, "model", "name")
        store = self._store("pull", name)
        is_insecure = call.fields.flag("insecure")
        await self._run(call, lambda task: store.pull(name, task=task, is_insecure=is_insecure))

    async def push(self, call: Call) -> None:
        """Upload a model of the store to the registry in its name. Raises as `pull`."""
        name = _name(call.fields, "model", "name")
        store = self._store("push", name)
        is_insecure = call.fields.flag("insecure")
        await self._run(call, lambda task: store.push(str(name), task=task, is_insecure=is_insecure))

    async def create(self, call: Call) -> None:
        """Make a model from another one, or from blobs that were uploaded. Raises as `pull`."""
        name = _name(call.fields, "model", "name")
        recipe = _recipe(call.fields)
        bases = [parse_name(recipe.base)] if recipe.base else []
        store = self._store("create", name, *bases)
        await self._run(call, lambda task: store.create(str(name), recipe, task))

    async def _run(self, call: Call, work: Callable[[StoreTask], object]) -> None:
        is_streamed = call.fields.flag("stream", True)
        reports = _Reports(asyncio.get_running_loop())
        task = StoreTask(reports.take)
        running = asyncio.get_running_loop().run_in_executor(self._pool, work, task)
        running.add_done_callback(reports.end)
        try:
            while not running.done():
                await reports.arrived.wait()
                for frame in reports.frames():
                    if is_streamed and not call.send(call.framing.frame(frame)):
                        await call.wait_for_room()
            await running
        finally:
            task.cancel()
        await self._dataplane.unloaded_configs()  # the repository sees the change at once
        if is_streamed:
            await call.finish(b"".join(call.framing.frame(frame) for frame in reports.frames()))
        else:
            call.answer({"status": "success"})

    # Operations that are done at once.

    async def copy(self, call: Call) -> None:
        """Give a model a second name. Raises NotFoundError."""
        source, target = _name(call.fields, "source"), _name(call.fields, "destination")
        store = self._store("copy", source, target)
        await self._in_thread(call, lambda: store.copy(str(source), str(target)))

    async def delete(self, call: Call) -> None:
        """Remove a model, and unload it. Raises NotFoundError."""
        name = _name(call.fields, "model", "name")
        store = self._store("delete", name)
        await self._in_thread(call, lambda: store.remove(str(name)))

    async def _in_thread(self, call: Call, work: Callable[[], object]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except NotFoundError as error:
            asked = next((call.fields.text(each) for each in ("source", "model", "name") if call.fields.has(each)), "")
            raise NotFoundError(f"model '{asked:.200}' not found: {error.message}") from None
        await self._dataplane.unloaded_configs()
        call.answer_text(b"")

    # Blobs.

    def has_blob(self, exchange: HttpExchange, digest: str) -> None:
        """200 or 404."""
        self._later.begin(exchange, self._find_blob(digest))

    def take_blob(self, pipe: BodyPipe, digest: str) -> None:
        """Write a body that is arriving to the disk. Raises ServerError where it is not wanted."""
        store = self._store("add blob")
        if self._num_uploads >= _MAX_UPLOADS:
            raise UnavailableError(f"{_MAX_UPLOADS} blobs are being uploaded already; try again later")
        self._num_uploads += 1
        pipe.start(self._uploading, partial(_write_piped, store, digest)).add_done_callback(self._end_upload)

    def _end_upload(self, _done: asyncio.Future[bool]) -> None:
        self._num_uploads -= 1

    def add_blob(self, exchange: HttpExchange, digest: str) -> None:
        """201 for a body that has this digest, 200 for one that is in the store already."""
        self._later.begin(exchange, self._add_blob(exchange.body, digest))

    async def _find_blob(self, digest: str) -> HttpResponse:
        store = self._store("read blobs")
        is_there = await asyncio.get_running_loop().run_in_executor(self._pool, store.has_blob, digest)
        if not is_there:
            raise NotFoundError(f'blob "{digest}" not found')
        return HttpResponse(200, (), ())

    async def _add_blob(self, body: Buffer, digest: str) -> HttpResponse:
        if isinstance(body, PipedBody):  # `take_blob` was allowed to
            return HttpResponse(201 if await body.pipe.finish() else 200, (), ())
        store = self._store("add blob")
        check_size(body, self._limits)

        def write() -> bool:
            if store.has_blob(digest):
                return False
            store.write_blob(digest, _chunks(body))
            return True

        is_new = await asyncio.get_running_loop().run_in_executor(self._pool, write)
        return HttpResponse(201 if is_new else 200, (), ())

    def _store(self, action: str, *names: ModelName) -> Store:
        return self._controlplane.store_for(action, *(name.repository_name for name in names))


class _Reports:
    """Reports of an operation's threads on their way to the event loop. Of each blob only the newest one waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.arrived = asyncio.Event()
        self._loop = loop
        self._lock = threading.Lock()  # guards _waiting
        self._waiting: dict[tuple[str, str], Progress] = {}

    def take(self, progress: Progress) -> None:
        """Called from threads of the store."""
        with self._lock:
            is_first = not self._waiting
            self._waiting[progress.status, progress.digest] = progress
        if is_first:
            self._loop.call_soon_threadsafe(self.arrived.set)

    def end(self, done: asyncio.Future[object]) -> None:
        """The operation has ended. Its error is looked at, even if the client has left."""
        if not done.cancelled():
            done.exception()
        self.arrived.set()

    def frames(self) -> list[bytes]:
        """The documents of the reports since this was called last."""
        self.arrived.clear()
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        return [orjson.dumps(_document(progress)) for progress in waiting.values()]


def _document(progress: Progress) -> dict[str, Any]:
    document: dict[str, Any] = {"status": progress.status}
    if progress.digest:
        document |= {"digest": progress.digest, "total": progress.total, "completed": progress.completed}
    return document


def _write_piped(store: Store, digest: str, pipe: BodyPipe) -> bool:
    """Whether the blob is new. In a thread."""
    if store.has_blob(digest):
        for _ in pipe.pieces():
            pass
        return False
    if pipe.num_bytes is not None:
        store.blobs.check_room(pipe.num_bytes, digest)
    store.write_blob(digest, pipe.pieces())
    return True


def _chunks(body: Buffer) -> Iterator[bytes]:
    view = memoryview(body)
    for start in range(0, len(view), _CHUNK_BYTES):
        yield bytes(view[start : start + _CHUNK_BYTES])


def _name(fields: Fields, *members: str) -> ModelName:
    """The model that the first of these members names which is there."""
    text = next((text for each in members if (text := fields.text(each))), "")
    if not text:
        raise ParameterError(f"{members[0]} is required", members[0], Fault.MISSING)
    try:
        return parse_name(text)
    except ServerError as error:
        raise ParameterError(error.message, members[0]) from None


# A recipe from the members of a request.


def _recipe(fields: Fields) -> Recipe:
    text = fields.text("modelfile")
    recipe = _recipe_of_modelfile(_parsed("modelfile", parse_modelfile, text)) if text else Recipe()
    base, files = fields.text("from"), _texts(fields, "files")
    if base and files:
        raise ParameterError("'from' and 'files' exclude each other", "from")
    if base:
        recipe = replace(recipe, base=str(_name(fields, "from")))
    elif files:
        recipe = replace(recipe, base="", files=files)
    elif not recipe.base:
        raise ParameterError("neither 'from' or 'files' was specified", "from", Fault.MISSING)
    template, system = fields.text("template"), fields.text("system")
    recipe = replace(
        recipe,
        template=recipe.template if template is None else template,
        system=recipe.system if system is None else system,
        parameters={**recipe.parameters, **_parameters(fields)},
        messages=_messages(fields) or recipe.messages,
        licenses=_licenses(fields) or recipe.licenses,
        adapters=_texts(fields, "adapters"),
        draft_files=_texts(fields, "draft_files"),
        quantization=_quantization(fields),
    )
    if recipe.template:
        _parsed("template", bundled_module("llm", "text.ollama_template").OllamaTemplate, recipe.template)
    return recipe


def _quantization(fields: Fields) -> Quantization | None:
    text = fields.text("quantize") or fields.text("quantization")
    if not text:
        return None
    try:
        return quantization_of(text)
    except InvalidArgumentError as error:
        raise ParameterError(error.message, "quantize", Fault.INVALID_VALUE) from None


def quantization_of(text: str) -> Quantization:
    """The quantization called so in any case. Raises InvalidArgumentError for an unknown one."""
    method = text.lower()
    if method not in QUANTIZATIONS:
        known = ", ".join(map(str.upper, QUANTIZATIONS))
        raise InvalidArgumentError(f"unsupported quantization type {text:.40}: this server writes {known}")

    def write(source: Path, target: Path, report: Callable[[int, int], None]) -> None:
        with bundled_module("llm", "checkpoint").open_checkpoint(source) as checkpoint:
            bundled_module("llm", "gguf_copy").write_gguf_copy(checkpoint, target, method, report=report)

    return Quantization(name=method.upper(), write=write)


def _recipe_of_modelfile(modelfile: Modelfile) -> Recipe:
    if modelfile.adapters or modelfile.drafts or len(modelfile.sources) > 1:
        raise UnsupportedError(
            "'modelfile' has ADAPTER, DRAFT, or several FROM, which name files of the client: upload their blobs, and "
            "say 'adapters', 'draft_files' and 'files'"
        )
    return Recipe(
        base=str(parse_name(modelfile.source)),
        template=modelfile.template,
        system=modelfile.system,
        parameters=modelfile.parameters,
        messages=modelfile.messages,
        licenses=modelfile.licenses,
    )


def _parsed(name: str, parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except InvalidArgumentError as error:
        raise ParameterError(error.message, name) from None


def _parameters(fields: Fields) -> dict[str, Any]:
    """Options by their names. A text may stand for a number, as in a Modelfile."""
    found = {}
    for name, value in (fields.mapping("parameters") or {}).items():
        try:
            if not is_option(name):
                option_of_text(name, "")  # which says so
            found[name] = option_of_text(name, value) if isinstance(value, str) else check_option(name, value)
        except InvalidArgumentError as error:
            raise ParameterError(error.message, f"parameters.{name}", Fault.INVALID_VALUE) from None
    return found


def _messages(fields: Fields) -> list[Mapping[str, Any]]:
    messages: list[Mapping[str, Any]] = []
    for message in fields.objects("messages", MAX_MESSAGES) or ():
        role = message.word("role", _ROLES) or "user"
        messages.append({"role": role, "content": message.text("content") or ""})
    return messages


def _licenses(fields: Fields) -> list[str]:
    value = fields.document.get("license")
    texts = [value] if isinstance(value, str) else value
    if texts is not None and not (isinstance(texts, list) and all(isinstance(each, str) for each in texts)):
        raise fields.wrong("license", "a string or an array of strings", value)
    return [each for each in texts or () if each]


def _texts(fields: Fields, name: str) -> dict[str, str]:
    found = fields.mapping(name) or {}
    if not all(isinstance(value, str) and value for value in found.values()):
        raise ParameterError(f"'{name}' must be an object of digests by the names of files", name)
    return found
