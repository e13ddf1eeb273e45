"""Answers of a model that is served elsewhere: requests with their tensors in, several in flight, outputs out."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np

from modelserver.bench.encode import RequestForm
from modelserver.bench.tensors import InputTensor
from modelserver.client.control import ControlClient
from modelserver.client.endpoint import Endpoint
from modelserver.client.grpc_lane import GrpcLane
from modelserver.client.grpc_messages import frame, unframe
from modelserver.client.grpc_pool import GrpcPool
from modelserver.client.heads import GrpcRequestHead, HttpRequestHead, model_path
from modelserver.client.http_lane import HttpLane
from modelserver.client.infer_answer import grpc_outputs, http_outputs
from modelserver.client.lane import Lane, Questions
from modelserver.config.message import config_from_json, config_to_json
from modelserver.config.schema import ModelConfig
from modelserver.core.tensor import Tensor, tensor_to_bytes
from modelserver.errors import InvalidArgumentError, NotFoundError, ServerError, UnavailableError
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.toolkit.comparison import Parity, accuracies, differences, label_output
from modelserver.toolkit.samples import Array, Samples

_READY = "READY"


class TunedModel:
    """Made by `borrowed`, which gives the model back as it was. `was_loaded` and `config` are known after `open`."""

    def __init__(self, control: ControlClient, name: str) -> None:
        self.name = name
        self.was_loaded = True
        self.config = ModelConfig()
        self._control = control
        self._document: dict[str, Any] = {}
        self._is_changed = False

    def open(self) -> None:
        """Look how the model is, and load it if it is not. Raises ServerError."""
        self.was_loaded = self._is_ready()
        if not self.was_loaded:
            self._is_changed = True
            self._control.load(self.name)
        self._document = self._control.model_config(self.name)
        self.config = config_from_json(self._document, source=f"config of model '{self.name}'")
        if self.config.is_ensemble:
            raise InvalidArgumentError(
                f"model '{self.name}' is an ensemble, which has no instances of its own: tune its models"
            )

    def _is_ready(self) -> bool:
        rows = [row for row in self._control.index() if row.get("name") == self.name]
        if not rows:
            # Asking for it tells what was meant.
            self._control.model_metadata(self.name)
            raise NotFoundError(f"there is no model '{self.name}'")
        return any(row.get("state") == _READY for row in rows)

    def use(self, config: ModelConfig) -> None:
        """Serve with `config` from here on. Raises ServerError, and then the model serves as before."""
        self._is_changed = True
        self._load_with(config_to_json(config))

    def _load_with(self, document: dict[str, Any]) -> None:
        """Load the model with this config in place of its own."""
        self._control.load(self.name, {"config": json.dumps(document)})

    def give_back(self) -> None:
        """The model as it was: with the config of before, or not loaded. Raises ServerError."""
        if not self._is_changed:
            return
        if not self.was_loaded:
            self._control.unload(self.name)
            return
        self._control.load(self.name, {"override": False})
        # The served config may have been an override itself, or the file may have changed since.
        if self._control.model_config(self.name) != self._document:
            self._load_with(self._document)
        self._is_changed = False


@contextmanager
def borrowed(control: ControlClient, name: str) -> Iterator[TunedModel]:
    """The model for the time of the block; then it is given back, whatever ended the block.

    SIGTERM ends it as Ctrl-C does, and neither disturbs the way back. Raises ServerError; UnavailableError with what to
    do when the model cannot be given back.
    """
    with _terminable():
        model = TunedModel(control, name)
        try:
            model.open()
            yield model
        finally:
            with _undisturbed():
                try:
                    model.give_back()
                except ServerError as error:
                    raise UnavailableError(
                        f"model '{name}' could not be given back its config: {error.message}; "
                        f"do it with: modelserver {'load' if model.was_loaded else 'unload'} {name}"
                    ) from error


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM act as SIGINT meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as set by shells for background jobs
        signal.default_int_handler(number, frame)
    # As Ctrl-C: an event loop that runs ends its tasks in order.
    signal.raise_signal(signal.SIGINT)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM meanwhile: a second Ctrl-C must not leave a stranger's config behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = (signal.SIGINT, signal.SIGTERM)
    old = [signal.signal(name, signal.SIG_IGN) for name in names]
    try:
        yield
    finally:
        for name, handler in zip(names, old, strict=True):
            signal.signal(name, handler)


# The time limit of one request.
ANSWER_TIMEOUT_S = 300.0

Outputs = dict[str, Array]


def served_answers(
    endpoint: Endpoint, config: ModelConfig, samples: Samples, *, rows: int, num_inflight: int
) -> Outputs:
    """The outputs for all samples, each [count, ...]: requests of `rows` samples, `num_inflight` of them at a time.

    Raises ServerError with the server's words, or for outputs whose shape varies.
    """
    requests = list(samples.requests(config, rows))
    parts = asyncio.run(_ask_all(endpoint, config, requests, num_inflight))
    has_batch = bool(config.max_batch_size)
    try:
        return {
            name: np.concatenate([part[name] if has_batch else part[name][None] for part in parts]) for name in parts[0]
        }
    except (KeyError, ValueError):
        raise ServerError(f"model '{config.name}': outputs that vary cannot be compared") from None


async def _ask_all(
    endpoint: Endpoint, config: ModelConfig, requests: Sequence[Mapping[str, Array]], num_inflight: int
) -> list[Outputs]:
    """The answers in the requests' order."""
    line = _Line(endpoint, config)
    left = iter(enumerate(requests))
    found: list[Outputs] = [{} for _ in requests]
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(num_inflight, len(requests))):
                group.create_task(_ask_on(line, await line.lane(), left, found))
    except ExceptionGroup as errors:
        # One reason is enough: the others are mostly the same.
        raise errors.exceptions[0] from None
    finally:
        line.close()
    return found


async def _ask_on(
    line: _Line, lane: Lane, left: Iterator[tuple[int, Mapping[str, Array]]], found: list[Outputs]
) -> None:
    for place, arrays in left:
        found[place] = await line.ask(lane, arrays)


class _Line:
    """The connections to one model: a lane each over HTTP, all on one connection over gRPC."""

    def __init__(self, endpoint: Endpoint, config: ModelConfig) -> None:
        self._endpoint = endpoint
        self._datatypes = {spec.name: spec.data_type for spec in config.input}
        self._form = RequestForm(config.name, "")
        path = model_path(config.name, "") + "/infer"
        self._head = HttpRequestHead(endpoint.address, "POST", path, endpoint.headers)
        self._pool: GrpcPool | None = None
        self._lanes: list[Lane] = []
        self._questions = Questions()

    async def lane(self) -> Lane:
        """One more lane. Raises UnavailableError."""
        lane: Lane
        if self._endpoint.is_grpc:
            if self._pool is None:
                fields = GrpcRequestHead(self._endpoint.address, "ModelInfer", self._endpoint.headers).fields
                self._pool = GrpcPool(self._endpoint.address, fields=fields)
                await self._pool.prepare()
            lane = GrpcLane(self._pool, self._questions)
        else:
            lane = HttpLane(self._endpoint.address, self._questions)
            await lane.connect()
        self._lanes.append(lane)
        return lane

    async def ask(self, lane: Lane, arrays: Mapping[str, Array]) -> Outputs:
        """The outputs of one request. Raises ServerError."""
        inputs = [self._input(name, array) for name, array in arrays.items()]
        if self._endpoint.is_grpc:
            request = frame(self._form.grpc(inputs, {}, asks_for_final=False).content)
        else:
            request = self._form.http(self._head, inputs, {}).content
        await self._questions.ask(lane, request, ANSWER_TIMEOUT_S)
        if isinstance(lane, HttpLane):
            _, outputs = http_outputs(lane.answer, lane.json_len)
        else:
            outputs = grpc_outputs(pb.ModelInferResponse.FromString(unframe(lane.answer, "none")))
        return {output.name: output.tensor().data for output in outputs}

    def _input(self, name: str, array: Array) -> InputTensor:
        datatype = self._datatypes[name]
        assert datatype is not None, "a completed config has datatypes"
        tensor = Tensor(name, datatype, np.ascontiguousarray(array, dtype=datatype.numpy))
        return InputTensor(name, datatype, tensor.shape, bytes(tensor_to_bytes(tensor)))

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
        if self._pool is not None:
            self._pool.abandon()


def reason_not_to_ask(config: ModelConfig) -> str:
    """Why a model's answers cannot be compared; empty if they can."""
    if config.is_decoupled:
        return "the model is decoupled"
    if config.sequence_batching is not None:
        return "an answer depends on the sequence before it"
    return ""


def check_labels(config: ModelConfig, samples: Samples, wanted: str) -> None:
    """Raise InvalidArgumentError now for labels that fit no output: measuring takes minutes."""
    if samples.labels is not None or wanted:
        label_output(config, wanted)


def compare_settings(
    model: TunedModel,
    endpoint: Endpoint,
    samples: Samples,
    settings: tuple[ModelConfig, ModelConfig],
    *,
    rows: int,
    num_inflight: tuple[int, int],
    output: str,
) -> Parity:
    """The answers with the first setting and with the second one, both under load: requests of `rows` samples, with
    `num_inflight` of them in flight. Afterwards the second setting serves. Raises ServerError.
    """
    found: list[Outputs] = []
    for config, count in zip(settings, num_inflight, strict=True):
        model.use(config)
        found.append(served_answers(endpoint, config, samples, rows=rows, num_inflight=count))
    before, after = accuracies(settings[0], samples, (found[0], found[1]), output)
    return Parity(
        differences=differences(found[0], found[1]),
        num_samples=samples.count,
        accuracy_before=before,
        accuracy_after=after,
    )
