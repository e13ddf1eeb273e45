"""Serves directories of Hugging Face: the config tells the task, and the task its inputs and outputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from modelserver.backend import (
    Array,
    Backend,
    BackendContext,
    BatchInstance,
    ConfigError,
    Datatype,
    DeviceKind,
    FileSignature,
    InferRequest,
    InferResponse,
    InternalError,
    InvalidArgumentError,
    ModelConfig,
    NotFoundError,
    Placement,
    ServerError,
    Tensor,
    missing_package,
    note_device_error,
)

from . import speech
from .tasks import ARCHITECTURES, TASKS, Row, Task

_CONFIG = "config.json"
_EXTRA = "transformers"
_DEFAULT_MAX_BATCH_SIZE = 32


class TransformersInstance(BatchInstance):
    """Answers all rows of all requests by one call of the network."""

    def __init__(self, task: Task, config: ModelConfig, num_threads: int) -> None:
        self._task = task
        self._outputs = {spec.name: spec.data_type for spec in config.output}
        self._is_batched = config.max_batch_size > 0
        self._num_threads = num_threads

    def execute(self, requests: Sequence[InferRequest]) -> list[InferResponse | ServerError]:
        if self._num_threads:
            self._task.torch.set_num_threads(self._num_threads)
            self._num_threads = 0  # it holds for the thread that calls
        rows = [self._rows(request) for request in requests]
        try:
            found = iter(self._answer([row for each in rows for row in each]))
            return [self._response([next(found) for _ in each]) for each in rows]
        except InvalidArgumentError as error:
            if len(requests) == 1:
                return [error]
        return [self.execute([request])[0] for request in requests]  # one of them is wrong

    def _rows(self, request: InferRequest) -> list[Row]:
        arrays = {name: tensor.data for name, tensor in request.inputs.items()}
        if not self._is_batched:
            return [arrays]
        count = len(next(iter(arrays.values())))
        return [{name: array[index] for name, array in arrays.items()} for index in range(count)]

    def _answer(self, rows: Sequence[Row]) -> list[Row]:
        try:
            return self._task.answer(rows)
        except ServerError:
            raise
        except (ValueError, IndexError, TypeError) as error:
            raise InvalidArgumentError(f"the model refuses the inputs: {error}") from error
        except Exception as error:
            note_device_error(error)
            raise InternalError(f"the model failed: {type(error).__name__}: {error}") from error

    def _response(self, answers: Sequence[Row]) -> InferResponse:
        tensors = []
        for name, datatype in self._outputs.items():
            assert datatype is not None, "a checked output has a datatype"
            array = _stacked([answer[name] for answer in answers], datatype)
            tensors.append(Tensor(name, datatype, array if self._is_batched else array[0]))
        return InferResponse(tensors)


class TransformersBackend(Backend):
    """One version of a model. Each instance has weights of its own.

    Parameters: `task`, if the architecture does not tell it; `threads`; `threshold` of detected objects;
    `hypothesis_template` and `multi_label` of zero-shot classification; `max_answer_length` in tokens; `max_windows` of
    a batch and `max_audio_seconds` of a file of Whisper.
    """

    model_filenames = (_CONFIG,)
    extra = _EXTRA
    option_names = frozenset[str]()
    supports_gpu = True
    completes_quickly = True

    @classmethod
    def complete_config(cls, context: BackendContext) -> ModelConfig:
        document = _read_config(context)
        task = _task_of(context, document)
        if task is None:
            return speech.complete_config(context)
        labels = document.get("id2label")
        num_labels = len(labels) if isinstance(labels, dict) else document.get("num_labels", 2)
        signature = FileSignature(task.inputs, task.outputs(num_labels), is_lenient=True)
        return context.complete_config(signature, default_max_batch_size=_DEFAULT_MAX_BATCH_SIZE)

    def load(self) -> None:
        self._task = _task_of(self.context, _read_config(self.context))

    def create_instance(self, placement: Placement) -> TransformersInstance | speech.SpeechInstance:
        context = self.context
        device = f"cuda:{placement.device_id}" if placement.kind is DeviceKind.GPU else "cpu"
        extra = _EXTRA if self._task else f"{_EXTRA},audio"
        try:
            if self._task is None:
                return speech.SpeechInstance(context, device)
            task = self._task(context, device)
        except ImportError as error:
            package = error.name or str(error).strip().splitlines()[0]
            raise missing_package(package, extra, "backend 'transformers'") from error
        except Exception as error:
            reason = " ".join(str(error).split("\n")[:3])
            raise InvalidArgumentError(
                f"model '{context.model_name}' version {context.version}: transformers cannot load "
                f"{context.version_directory}: {reason[:500]}"
            ) from error
        return TransformersInstance(task, context.config, context.int_parameter("threads"))


def _read_config(context: BackendContext) -> dict[str, Any]:
    path = context.version_directory / _CONFIG
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise NotFoundError(f"model '{context.model_name}' version {context.version}: no file {path}") from None
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise InvalidArgumentError(f"{path}: expected a JSON object")
    return document


def _task_of(context: BackendContext, document: dict[str, Any]) -> type[Task] | None:
    """The task that the config names, or the architecture; None for Whisper, which answers in steps."""
    named = context.parameter("task")
    known = ", ".join((*TASKS, speech.TASK))
    if named == speech.TASK:
        return None
    if named:
        if named not in TASKS:
            raise ConfigError(f"model '{context.model_name}': parameter task: expected one of {known}, got '{named}'")
        return TASKS[named]
    architectures = document.get("architectures") or ["none"]
    if architectures[0] == speech.ARCHITECTURE:
        return None
    for ending, task in ARCHITECTURES.items():
        if str(architectures[0]).endswith(ending):
            return TASKS[task]
    raise ConfigError(
        f"model '{context.model_name}': the architecture {architectures[0]} does not tell the task; say which by "
        f'parameters {{ key: "task" value: {{ string_value: ... }} }}: {known}'
    )


def _stacked(values: Sequence[Any], datatype: Datatype) -> Array:
    """One array for all rows; shorter ones are filled up with zeros, empty texts, or in masks with -1."""
    arrays = [
        np.atleast_1d(np.array(value, object if datatype is Datatype.BYTES else datatype.numpy)) for value in values
    ]
    shape = tuple(max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True))
    fill: Any = b"" if datatype is Datatype.BYTES else -1 if datatype is Datatype.INT64 else 0
    stacked = np.full((len(arrays), *shape), fill, arrays[0].dtype)
    for target, array in zip(stacked, arrays, strict=True):
        target[tuple(slice(size) for size in array.shape)] = array
    return stacked


BACKEND = TransformersBackend
