"""The backend `remote`: completes a model's config from the server that executes it, and sends it requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from modelserver.backend import (
    Backend,
    BackendContext,
    BatchInstance,
    ConfigError,
    Datatype,
    InferRequest,
    InvalidArgumentError,
    Measurement,
    ModelConfig,
    ModelInput,
    ModelOutput,
    ModelTransactionPolicy,
    Placement,
    ServerError,
    UnavailableError,
)
from modelserver.config.message import config_from_json
from modelserver.endpoints.membership import Source
from modelserver.remote.chat_text import completed
from modelserver.remote.model import RemoteModel, make_transport, measurements, source_of
from modelserver.remote.options import RemoteOptions, read_options
from modelserver.remote.v2 import Described

# While no endpoint tells its model's config.
RETRY_S = 1.0
DESCRIBE_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 10.0
# What the APIs of language models read of a config.
_TRAITS = (
    "max_model_len",
    "tool_parser",
    "reasoning_parser",
    "fill_in_middle",
    "labels",
    "default_max_tokens",
)


class RemoteInstance(BatchInstance):
    """Hands requests to the event loop, where they wait for their answers."""

    answers_later = True

    def __init__(self, model: RemoteModel, loop: asyncio.AbstractEventLoop) -> None:
        self._model = model
        self._loop = loop

    def execute(self, requests: Sequence[InferRequest]) -> None:
        try:
            is_on_loop = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_on_loop = False
        for request in requests:
            if is_on_loop:
                self._model.begin(request, request.sender)
            else:
                self._loop.call_soon_threadsafe(self._model.begin, request, request.sender)

    def is_ready(self) -> bool:
        return self._model.is_ready

    def measure(self) -> Sequence[Measurement]:
        return measurements(self._model)


class RemoteBackend(Backend):
    """One version of a model here, and a model of other servers there."""

    runs_inline = True
    option_names = frozenset[str]()

    @classmethod
    def check_written(cls, context: BackendContext) -> None:
        read_options(context)

    @classmethod
    def complete_config(cls, context: BackendContext) -> ModelConfig:
        """Ask the endpoints, one after the other, for the model's config.

        Raises UnavailableError, after which the load is tried again, if none answers.
        """
        # Execution is only to begin: the event loop is where requests wait, so a thread would be a detour.
        parameters = {"inline_execution": "always", **context.config.parameters}
        config = replace(context.config, parameters=parameters)
        options = read_options(context)
        if not options.speaks_v2:
            return replace(config, **completed(config))
        if config.input and config.output:
            return config
        described = asyncio.run(_described(options, config))
        return _completed(config, described, f"model '{context.model_name}'")

    def load(self) -> None:
        server = self.context.server
        if server is None:
            raise UnavailableError("a remote model can only be loaded by a server")
        self._loop = server.loop
        try:
            self._model = RemoteModel(self.context.model_name, read_options(self.context), self.context.config, server)
        except InvalidArgumentError as error:
            raise ConfigError(f"model '{self.context.model_name}': parameter discover: {error.message}") from None
        self._loop.call_soon_threadsafe(self._model.start)

    def create_instance(self, placement: Placement) -> RemoteInstance:
        del placement
        return RemoteInstance(self._model, self._loop)

    def unload(self) -> None:
        with suppress(RuntimeError, TimeoutError):  # the loop has ended
            asyncio.run_coroutine_threadsafe(self._model.stop(), self._loop).result(_STOP_TIMEOUT_S)


async def _described(options: RemoteOptions, config: ModelConfig) -> Described:
    problems = []
    key = options.secret.read()
    headers = {**({"authorization": f"Bearer {key}"} if key else {}), **options.headers}
    try:
        addresses = await _first_members(source_of(options))
    except (ServerError, TimeoutError) as error:
        raise _not_yet(str(error) or f"no list of endpoints within {DESCRIBE_TIMEOUT_S:g} s") from None
    for address in addresses:
        try:
            transport = make_transport(options.place(address), options, config)
            try:
                async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                    return await transport.describe(headers)
            finally:
                transport.lose("done")
        except TimeoutError:
            problems.append(f"{address}: no answer within {DESCRIBE_TIMEOUT_S:g} s")
        except ServerError as error:
            problems.append(f"{address}: {error.message}")
    raise _not_yet("; ".join(problems) or "the list of endpoints is empty")


async def _first_members(source: Source) -> list[str]:
    async with asyncio.timeout(DESCRIBE_TIMEOUT_S), aclosing(source.members(asyncio.Event())) as changes:
        async for members in changes:
            return [member.address for member in members]
    return []


def _not_yet(problem: str) -> UnavailableError:
    error = UnavailableError(f"no endpoint tells the model's config yet: {problem}")
    error.retry_after_s = RETRY_S
    return error


def _completed(config: ModelConfig, described: Described, what: str) -> ModelConfig:
    """The config with the tensors, the batching and the transaction policy of the remote model."""
    if described.config is None:
        inputs, outputs = (
            [(each["name"], _datatype(each, what), tuple(map(int, each.get("shape", ())))) for each in listed]
            for listed in (described.metadata.get("inputs", []), described.metadata.get("outputs", []))
        )
        return replace(
            config,
            input=config.input or tuple(ModelInput(name, datatype, dims=dims) for name, datatype, dims in inputs),
            output=config.output or tuple(ModelOutput(name, datatype, dims=dims) for name, datatype, dims in outputs),
        )
    remote = config_from_json(described.config, source=f"config that the endpoint of {what} tells")
    traits = {name: remote.parameters[name] for name in _TRAITS if name in remote.parameters}
    return replace(
        config,
        max_batch_size=config.max_batch_size or remote.max_batch_size,
        input=config.input
        or tuple(
            ModelInput(
                each.name,
                each.data_type,
                dims=each.dims,
                optional=each.optional,
                allow_ragged_batch=each.allow_ragged_batch,
            )
            for each in remote.input
        ),
        output=config.output or tuple(ModelOutput(each.name, each.data_type, dims=each.dims) for each in remote.output),
        parameters={**traits, **config.parameters},
        model_transaction_policy=config.model_transaction_policy
        or (ModelTransactionPolicy(decoupled=True) if remote.is_decoupled else None),
    )


def _datatype(tensor: dict[str, Any], what: str) -> Datatype:
    try:
        return Datatype(tensor.get("datatype"))
    except ValueError:
        raise ConfigError(f"{what}: the endpoint tells an unknown datatype {tensor.get('datatype')!r}") from None
