"""Instances for tests of child processes; the functions here are called in the child."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np
from support.instances import Doubling

from modelserver.backend import (
    Array,
    Backend,
    BatchInstance,
    InferRequest,
    InferResponse,
    InvalidArgumentError,
    Placement,
    ServerError,
    Tensor,
    TensorInstance,
)
from modelserver.core.datatype import Datatype


class EchoInstance(BatchInstance):
    """Answers a request with its inputs; the parameter `do` asks for mischief instead."""

    def __init__(self, close_delay_s: float = 0.0) -> None:
        self._close_delay_s = close_delay_s
        self._kept: list[object] = []

    def execute(self, requests: Sequence[InferRequest]) -> list[InferResponse | ServerError]:
        return [self._answer(request) for request in requests]

    def close(self) -> None:
        time.sleep(self._close_delay_s)

    def _answer(self, request: InferRequest) -> InferResponse | ServerError:
        action, _, argument = str(request.parameters.get("do", "")).partition(" ")
        if action:
            answer = getattr(self, action)(request, argument)
            if answer is not None:
                return answer
        return InferResponse(list(request.inputs.values()), parameters=request.parameters or None)

    def exit(self, _request: InferRequest, status: str) -> None:
        print("about to leave", file=sys.stderr)
        os._exit(int(status))

    def mumble(self, _request: InferRequest, _argument: str) -> InferResponse:
        """An answer whose record the server cannot read: an output's name is no text."""
        return InferResponse([_tensor(b"x", np.zeros(1))])  # type: ignore[arg-type]  # that is the mischief

    def segfault(self, _request: InferRequest, _argument: str) -> None:
        ctypes.string_at(0)

    def fail(self, _request: InferRequest, text: str) -> None:
        raise ValueError(text)

    def refuse(self, _request: InferRequest, text: str) -> ServerError:
        return InvalidArgumentError(text)

    def flood(self, _request: InferRequest, num_lines: str) -> None:
        print("a flood\n" * int(num_lines), end="")
        os._exit(3)

    def sleep(self, _request: InferRequest, seconds: str) -> None:
        time.sleep(float(seconds))

    def meet(self, _request: InferRequest, paths: str) -> None:
        """Note that this one has come, at the first path, and wait for who notes it at the second."""
        own, other = paths.split()
        os.close(os.open(own, os.O_CREAT | os.O_WRONLY))
        while not os.path.exists(other):  # noqa: PTH110
            time.sleep(0.005)

    def hang_once(self, _request: InferRequest, path: str) -> None:
        """Hang the first time, which is noted at `path`."""
        if not os.path.exists(path):  # noqa: PTH110
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
            time.sleep(60)

    def note_and_exit(self, _request: InferRequest, path: str) -> None:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        os._exit(1)

    def keep(self, request: InferRequest, _argument: str) -> None:
        self._kept.append(request.inputs)

    def kept_sum(self, _request: InferRequest, _argument: str) -> InferResponse:
        total = sum(int(tensor.data.sum()) for inputs in self._kept for tensor in inputs.values())  # type: ignore[attr-defined]
        return InferResponse([_tensor("sum", np.array([total]))])

    def is_cancelled(self, request: InferRequest, _argument: str) -> InferResponse:
        return InferResponse([_tensor("is_cancelled", np.array([request.is_cancelled]))])

    def describe(self, request: InferRequest, _argument: str) -> InferResponse:
        fields = (request.id, request.sequence_id, request.sequence_start, request.sequence_end, request.timeout_us)
        return InferResponse([_tensor("fields", np.array([repr(fields)], dtype=object))])

    def environment(self, _request: InferRequest, key: str) -> InferResponse:
        return InferResponse([_tensor("value", np.array([os.environ.get(key, "")], dtype=object))])

    def fork(self, _request: InferRequest, _argument: str) -> None:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)


class WaveringInstance(EchoInstance):
    """Ready, or not, as the file at `path` says; "hang" makes the question hang."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def is_ready(self) -> bool:
        with open(self._path, encoding="utf-8") as file:  # noqa: PTH123
            return file.read() == "yes"


class DoublingBackend(Backend):
    """Makes TensorInstances."""

    def create_instance(self, placement: Placement) -> Doubling:
        return Doubling(placement)


class RaggedSumming(TensorInstance):
    """Adds the elements of each request, which lie flat one after the other, to its SUM."""

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        ends = np.cumsum(inputs["COUNT"])
        own = [part.sum() for part in np.split(inputs["IN"], ends[:-1])]
        total = inputs["SUM"] + np.array(own, np.float32).reshape(-1, 1)
        return {"OUT": total, "SUM": total}


class SummingBackend(Backend):
    def create_instance(self, placement: Placement) -> RaggedSumming:
        return RaggedSumming()


def echo(**arguments: float) -> EchoInstance:
    return EchoInstance(**arguments)


class HangingReadiness(EchoInstance):
    """Never says whether it is ready."""

    def is_ready(self) -> bool:
        time.sleep(600)
        return True


def never_ready() -> HangingReadiness:
    return HangingReadiness()


def wavering(path: str) -> WaveringInstance:
    return WaveringInstance(path)


def broken(text: str) -> EchoInstance:
    print("reading weights", flush=True)
    raise ValueError(text)


def crash_at_start() -> EchoInstance:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def hang_at_start() -> EchoInstance:
    time.sleep(60)
    raise AssertionError("unreachable")


def crash_after_first_start(path: str) -> EchoInstance:
    """Stands the first time, which it notes at `path`; later starts fail."""
    if os.path.exists(path):  # noqa: PTH110
        raise RuntimeError("once was enough")
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    return EchoInstance()


def stand_unless(path: str) -> EchoInstance:
    """Stands as long as there is nothing at `path`."""
    if os.path.exists(path):  # noqa: PTH110
        raise RuntimeError("no more")
    return EchoInstance()


def add(left: int, right: int) -> int:
    return left + right


def _tensor(name: str, data: np.ndarray) -> Tensor:
    return Tensor(name, Datatype.from_numpy(data.dtype), data)
