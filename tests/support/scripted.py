"""A model that does what its requests say: SCRIPT is BYTES [-1], one step per element, OUT what it says.

Steps: `say X`, `note X` (with the response parameter note), `fail X`, `flood N` (N responses of 64 KiB), `await-cancel`
(until the client has left), `last X`, `last-fail X`, `end`, `drop` (lose the sender), `wrong` (an output that is not
the model's), `raise` and `return X` (from `execute` itself, so they come first). Everything else happens in a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from modelserver.backend import (
    Backend,
    BatchInstance,
    Datatype,
    InferRequest,
    InferResponse,
    InternalError,
    InvalidArgumentError,
    Placement,
    ResponseSender,
    ServerError,
    Tensor,
)

CONFIG = """
backend: "scripted"
input [ { name: "SCRIPT", data_type: TYPE_STRING, dims: [ -1 ] } ]
output [ { name: "OUT", data_type: TYPE_STRING, dims: [ -1 ] } ]
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
PATIENCE_S = 60.0

# What models have done, in order: `cancelled`, `closed: text`, `sent N` (of a flood).
events: list[str] = []


def write_scripted(root: Path, name: str, more: str = DECOUPLED) -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(CONFIG + more)


def text_tensor(name: str, *texts: str) -> Tensor:
    data = np.empty(len(texts), object)
    data[:] = [text.encode() for text in texts]
    return Tensor(name, Datatype.BYTES, data)


class ScriptedInstance(BatchInstance):
    answers_later = True

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def execute(self, requests: Sequence[InferRequest]) -> list[InferResponse | ServerError | None]:
        return [self._begin(request) for request in requests]

    def _begin(self, request: InferRequest) -> InferResponse | None:
        steps = [step.decode().partition(" ")[::2] for step in request.inputs["SCRIPT"].data.ravel()]
        sender = request.sender
        match steps[0] if steps else ("end", ""):
            case ("raise", text):
                raise RuntimeError(text)
            case ("return", text):
                return InferResponse([text_tensor("OUT", text)])
        thread = threading.Thread(target=_play, args=(sender, steps), name="scripted")
        self._threads.append(thread)
        thread.start()
        return None

    def close(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)


def _play(sender: ResponseSender, steps: Sequence[tuple[str, str]]) -> None:
    try:
        for verb, text in steps:
            _take_step(sender, verb, text)
    except InternalError as error:
        events.append(f"closed: {error.message}")


def _take_step(sender: ResponseSender, verb: str, text: str) -> None:
    match verb:
        case "say":
            sender.send(InferResponse([text_tensor("OUT", text)]))
        case "note":
            sender.send(InferResponse([text_tensor("OUT", text)], parameters={"note": text}))
        case "fail":
            sender.send(InvalidArgumentError(text))
        case "flood":
            _flood(sender, int(text))
        case "await-cancel":
            cancelled = threading.Event()
            sender.watch(on_cancel=cancelled.set)
            assert cancelled.wait(PATIENCE_S), "nobody cancelled"
            events.append("cancelled")
        case "last":
            sender.finish(InferResponse([text_tensor("OUT", text)]))
        case "last-fail":
            sender.finish(InvalidArgumentError(text))
        case "end":
            sender.finish()
        case "wrong":
            sender.send(InferResponse([text_tensor("OTHER", text)]))
        case "drop":
            pass  # the thread ends, and with it the last reference
        case _:
            raise AssertionError(f"no such step: {verb}")


def _flood(sender: ResponseSender, num_responses: int) -> None:
    for number in range(num_responses):
        if sender.is_cancelled:
            break
        sender.send(InferResponse([text_tensor("OUT", "x" * 65536)]))
        events.append(f"sent {number}")


class ScriptedBackend(Backend):
    def create_instance(self, placement: Placement) -> ScriptedInstance:
        return ScriptedInstance()


BACKEND = ScriptedBackend
