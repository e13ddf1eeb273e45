"""LitServe's `LitAPI` and `LitServer`, for programs that were written for them.

Each LitAPI is a model, named by its path (`/predict`: `predict`), with the JSON of a request as its input `request` and
that of the answer as its output `response`. The paths are served besides, in LitServe's form. With `OpenAISpec` the
model, named by its class, is a language model for every API of the server. Workers are instances in threads.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np
import orjson

from modelserver.api import (
    STATUS,
    Api,
    ApiContext,
    ApiGroup,
    Call,
    ErrorWriter,
    HttpResponse,
    Route,
    RouteSchema,
    json_response,
)
from modelserver.backend import DeviceKind, InternalError, InvalidArgumentError, Placement, ServerError
from modelserver.embed.backend import Gathered, Served
from modelserver.embed.foreign import program
from modelserver.embed.foreign.program import translated
from modelserver.embed.server import Server
from modelserver.embed.signature import Signature, Tensor, Value, value_of

_logger = logging.getLogger(__name__)

REQUEST, RESPONSE = "request", "response"


class OpenAISpec:
    """The model is a chat model: `predict` is a generator of texts for a list of messages."""

    api_path = "/v1/chat/completions"


class Request(dict[str, Any]):
    """The annotation of `decode_request`; a request is its JSON object."""


class Response(dict[str, Any]):
    """The annotation of `encode_response`; an answer is any value that JSON has."""


class LitAPI:
    """What a request goes through: decode_request, batch, predict, unbatch, encode_response. Subclasses fill it in."""

    def __init__(
        self,
        max_batch_size: int = 1,
        batch_timeout: float = 0.0,
        api_path: str = "/predict",
        stream: bool = False,
        loop: object = "auto",
        spec: OpenAISpec | None = None,
        mcp: object = None,
        enable_async: bool = False,
    ) -> None:
        if max_batch_size < 1 or batch_timeout < 0 or not api_path.startswith("/"):
            raise ValueError("expected max_batch_size >= 1, batch_timeout >= 0 and an api_path that begins with /")
        if mcp is not None or loop not in ("auto", None):
            raise ValueError("modelserver serves LitAPIs without loop= and mcp=")
        self.max_batch_size = max_batch_size
        self.batch_timeout = batch_timeout
        self.api_path = api_path
        self.stream = stream
        self.spec = spec
        self.enable_async = enable_async
        self.device = "cpu"

    def setup(self, device: str) -> None:
        """Read the model. `device` is "cpu", or "cuda:0" and so on."""

    def decode_request(self, request: Any) -> Any:
        return request["messages"] if self.spec is not None else request

    def batch(self, inputs: list[Any]) -> Any:
        if hasattr(inputs[0], "__torch_function__"):
            import torch

            return torch.stack(inputs)
        return np.stack(inputs) if isinstance(inputs[0], np.ndarray) else inputs

    def predict(self, x: Any) -> Any:
        # As LitServe: a subclass defines it, and a program may make the base class before.
        raise NotImplementedError("a LitAPI needs the method predict")

    def unbatch(self, output: Any) -> Any:
        return map(list, output) if self.stream else list(output)

    def encode_response(self, output: Any) -> Any:
        return output

    def log(self, key: str, value: object) -> None:
        """Goes to the server's log."""
        _logger.info("%s: %s", key, value)


class LitServer:
    """Serves LitAPIs. Options that are about LitServe's own processes have no effect."""

    def __init__(
        self,
        lit_api: LitAPI | Sequence[LitAPI],
        accelerator: str = "auto",
        devices: int | str = "auto",
        workers_per_device: int = 1,
        timeout: float | bool = 30,
        spec: OpenAISpec | None = None,
        max_batch_size: int | None = None,
        batch_timeout: float = 0.0,
        stream: bool | None = None,
        api_path: str | None = None,
        **_without_effect: Any,
    ) -> None:
        self._apis = [lit_api] if isinstance(lit_api, LitAPI) else list(lit_api)
        for api in self._apis:
            if max_batch_size is not None:
                api.max_batch_size, api.batch_timeout = max_batch_size, batch_timeout
            api.stream = api.stream if stream is None else stream
            api.spec = api.spec if spec is None else spec
            api.api_path = api_path or api.api_path
        paths = [api.api_path for api in self._apis if api.spec is None]
        if len(set(paths)) < len(paths):
            raise ValueError(f"two LitAPIs have the same api_path: {', '.join(paths)}")
        self._devices = _gpus(accelerator, devices)
        self._workers = workers_per_device
        self._timeout_s = float(timeout) if timeout is not True and timeout not in (False, -1) else 0.0

    def run(self, host: str = "127.0.0.1", port: int | str = 8000, **_without_effect: Any) -> None:
        """Serve until stopped."""
        program.serve(self.server(host=host, http_port=int(port)))

    def server(self, **options: Any) -> Server:
        """A `modelserver.Server` with these models, not started."""
        server = Server(apis={"litserve": self._api}, **options)
        for api in self._apis:
            self._add(server, api)
        return server

    def _add(self, server: Server, api: LitAPI) -> None:
        config: dict[str, Any] = {}
        if self._devices:
            group = {"count": self._workers, "kind": "KIND_GPU", "gpus": self._devices}
            config["instance_group"] = [group]
        is_batched = api.max_batch_size > 1 and not (api.stream or api.enable_async or api.spec)
        if self._timeout_s and is_batched:
            policy = {"default_timeout_microseconds": round(1e6 * self._timeout_s), "timeout_action": "REJECT"}
            config["dynamic_batching"] = {"default_queue_policy": policy}
        server.add(
            _name(api),
            _served(api, is_batched),
            max_batch_size=api.max_batch_size if is_batched else 0,
            max_delay_ms=1000 * api.batch_timeout,
            instances=self._workers,
            config=config,
        )

    def _api(self, context: ApiContext) -> Api:
        routes = []
        errors = _Errors()
        for api in self._apis:
            if api.spec is None:
                serve = partial(_stream if api.stream else _answer, api)
                schema = RouteSchema(f"Ask {_name(api)}", body="object", answer="any")
                handler = context.handler(serve, errors)
                routes.append(Route("POST", api.api_path, handler, ApiGroup.INFERENCE, schema=schema))
        return Api("litserve", tuple(routes), errors, types={"Error": "{detail: string}"})


def _gpus(accelerator: str, devices: int | str) -> list[int]:
    if accelerator == "cpu" or (accelerator == "auto" and not _has_cuda()):
        return []
    if accelerator not in ("cuda", "gpu", "auto"):
        raise ValueError(f"accelerator '{accelerator}': expected cpu, cuda or auto")
    import torch

    return list(range(torch.cuda.device_count() if devices == "auto" else int(devices)))


def _has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def _name(api: LitAPI) -> str:
    return type(api).__name__ if api.spec is not None else api.api_path.strip("/").replace("/", "-") or "root"


def _served(api: LitAPI, is_batched: bool) -> Served:
    """The model of a LitAPI: an object of its hooks for each instance."""
    chat = api.spec is not None
    if chat:
        inputs: tuple[Value, ...] = (
            value_of("", "text_input", str, is_optional=True),
            value_of("", "messages", dict, is_optional=True),
        )
        outputs = (value_of("", "text_output", str),)
    else:
        annotation = Tensor("BYTES", 1) if is_batched else dict
        inputs = (value_of("", REQUEST, annotation),)
        outputs = (value_of("", RESPONSE, annotation),)
    signature = Signature(
        inputs,
        outputs,
        returns_value=True,
        is_stream=chat or api.stream,
        is_async=api.enable_async,
        gathers=is_batched,
    )
    return Served(partial(_Worker, api, is_batched), signature, is_factory=True)


class _Worker:
    """One instance. Workers share the LitAPI, whose `setup` is called for each, as in LitServe's threads."""

    def __init__(self, api: LitAPI, is_batched: bool) -> None:
        self._api = api
        self.predict: Callable[..., Any]
        if api.enable_async:
            self.predict = self._async_stream if api.stream or api.spec else self._async
        else:
            self.predict = self._stream if api.stream or api.spec else self._gather if is_batched else self._one

    def load(self, placement: Placement) -> None:
        device = f"cuda:{placement.device_id}" if placement.kind is DeviceKind.GPU else "cpu"
        self._api.device = device
        self._api.setup(device)

    def _one(self, request: Any) -> Any:
        return translated(self._run_one, request)

    def _run_one(self, request: Any) -> Any:
        api = self._api
        context: dict[str, Any] = {}
        x = _call(api.decode_request, context, request)
        return _plain(_call(api.encode_response, context, _call(api.predict, context, x)))

    def _gather(self, gathered: Sequence[Gathered]) -> list[Any]:
        """A request may hold several rows, each with a JSON of its own."""
        rows = [(number, row) for number, each in enumerate(gathered) for row in each.arguments[REQUEST].ravel()]
        results: list[Any] = [[] for _ in gathered]
        contexts: list[dict[str, Any]] = [{} for _ in rows]
        ready = []
        for index, (number, row) in enumerate(rows):
            try:
                ready.append((number, index, translated(_call, self._api.decode_request, contexts[index], _json(row))))
            except ServerError as error:
                results[number] = error
        if not ready:
            return results
        used = [contexts[index] for _, index, _ in ready]
        x = self._api.batch([decoded for _, _, decoded in ready])
        outputs = list(_call(self._api.unbatch, used, translated(_call, self._api.predict, used, x)))
        if len(outputs) != len(ready):
            raise InternalError(f"predict returned {len(outputs)} results for a batch of {len(ready)}")
        for (number, index, _), output in zip(ready, outputs, strict=True):
            try:
                encoded = _plain(translated(_call, self._api.encode_response, contexts[index], output))
                if not isinstance(results[number], ServerError):
                    results[number].append([orjson.dumps(encoded, option=orjson.OPT_SERIALIZE_NUMPY)])
            except ServerError as error:
                results[number] = error
        return [each if isinstance(each, ServerError) else np.array(each, object) for each in results]

    def _stream(self, request: Any = None, text_input: str = "", messages: Any = None) -> Iterator[Any]:
        api = self._api
        context: dict[str, Any] = {}
        body = self._body(request, text_input, messages)
        x = translated(_call, api.decode_request, context, body)
        is_batch = api.max_batch_size > 1 and api.spec is None
        outputs = _call(api.predict, context, api.batch([x]) if is_batch else x)
        if is_batch:
            outputs = (each[0] for each in api.unbatch(outputs))
        encoded = _call(api.encode_response, context, outputs)
        for one in encoded:
            yield _text(one) if api.spec is not None else _plain(one)

    async def _async(self, request: Any) -> Any:
        api = self._api
        context: dict[str, Any] = {}
        x = await _later(_call(api.decode_request, context, request))
        output = await _later(_call(api.predict, context, x))
        return _plain(await _later(_call(api.encode_response, context, output)))

    async def _async_stream(self, request: Any = None, text_input: str = "", messages: Any = None) -> Any:
        api = self._api
        context: dict[str, Any] = {}
        x = await _later(_call(api.decode_request, context, self._body(request, text_input, messages)))
        encoded = _call(api.encode_response, context, _call(api.predict, context, x))
        async with aclosing(encoded if hasattr(encoded, "__aiter__") else _each(encoded)) as values:
            async for one in values:
                yield _text(one) if api.spec is not None else _plain(one)

    def _body(self, request: Any, text_input: str, messages: Any) -> Any:
        if self._api.spec is None:
            return request
        return messages or {"messages": [{"role": "user", "content": text_input}]}


async def _each(values: Any) -> Any:
    for value in values:
        yield value


async def _later(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _call(hook: Callable[..., Any], context: Any, value: Any) -> Any:
    """A hook gets the request's context if it has a parameter of that name."""
    if "context" in inspect.signature(hook).parameters:
        return hook(value, context=context)
    return hook(value)


def _json(element: bytes) -> Any:
    try:
        return orjson.loads(element)
    except orjson.JSONDecodeError as error:
        raise InvalidArgumentError(f"expected JSON: {error}") from None


def _plain(value: Any) -> Any:
    """Models of pydantic as mappings; arrays and tensors as lists."""
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _text(output: Any) -> str:
    return str(output["content"]) if isinstance(output, Mapping) else str(output)


class _Errors(ErrorWriter):
    """`{"detail": ...}`"""

    def failed(self, error: Exception) -> HttpResponse:
        if isinstance(error, ServerError):
            return self.refused(STATUS[error.code], error.message)
        _logger.error("a call failed unexpectedly", exc_info=error)
        return self.refused(500, "internal error; the server's log has the details")

    def refused(self, status: int, message: str, code: str | None = None) -> HttpResponse:  # noqa: ARG002
        return json_response({"detail": message}, status)


async def _inputs(api: LitAPI, call: Call) -> dict[str, Any]:
    body = np.array([orjson.dumps(await call.json())], object)
    return {REQUEST: body[None] if api.max_batch_size > 1 and not (api.stream or api.enable_async) else body}


async def _answer(api: LitAPI, call: Call) -> None:
    outputs = await call.infer(_name(api), await _inputs(api, call))
    call.answer(orjson.Fragment(outputs[RESPONSE].reshape(-1)[0]))


async def _stream(api: LitAPI, call: Call) -> None:
    """Texts as they are; other values as a line of JSON each."""
    has_begun = False
    try:
        async with aclosing(call.stream(_name(api), await _inputs(api, call))) as responses:
            async for outputs in responses:
                piece = bytes(outputs[RESPONSE].reshape(-1)[0])
                value = orjson.loads(piece)
                await call.write(value.encode() if isinstance(value, str) else piece + b"\n")
                has_begun = True
    except ServerError as error:
        if not has_begun:
            raise
        await call.write(orjson.dumps({"detail": error.message}) + b"\n")
