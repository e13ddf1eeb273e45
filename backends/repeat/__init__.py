"""Triton's test backend `repeat`: answers a request once for each element of IN, after the delays that it says.

Inputs `IN` INT32 [-1], `DELAY` UINT32 [-1] (milliseconds before each response) and `WAIT` UINT32 [1] (milliseconds
before `execute` returns); outputs `OUT` INT32 [1], the element, and `IDX` UINT32 [1], its position. The model forms
no batches. If it is not decoupled, IN has one element, and the answer is sent before the request is finished.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from modelserver.backend import (
    Array,
    Backend,
    BackendContext,
    BatchInstance,
    ConfigError,
    Datatype,
    InferRequest,
    InferResponse,
    InternalError,
    InvalidArgumentError,
    Placement,
    ResponseSender,
    Tensor,
)

_MS = 0.001


class RepeatInstance(BatchInstance):
    """Answers each request from a thread of its own, so that requests overlap as their delays say."""

    answers_later = True

    def __init__(self, name: str, *, is_decoupled: bool) -> None:
        self._name = name
        self._is_decoupled = is_decoupled
        self._is_closing = False
        self._threads: dict[threading.Thread, threading.Event] = {}  # with what wakes them early

    def execute(self, requests: Sequence[InferRequest]) -> None:
        for request in requests:
            values, delays, wait = (request.inputs[name].data for name in ("IN", "DELAY", "WAIT"))
            sender = request.sender
            if len(values) != len(delays):
                text = f"expected IN and DELAY shape to match, got {list(values.shape)} and {list(delays.shape)}"
                sender.finish(InvalidArgumentError(text))
                continue
            if len(values) != 1 and not self._is_decoupled:
                text = f"expected one element of IN, because the model is not decoupled; got {len(values)}"
                sender.finish(InvalidArgumentError(text))
                continue
            wake = threading.Event()
            arguments = (sender, wake, values, delays)
            thread = threading.Thread(target=self._answer, args=arguments, name=f"{self._name}-answers")
            self._threads[thread] = wake
            thread.start()
            time.sleep(float(wait[0]) * _MS)

    def close(self) -> None:
        self._is_closing = True
        for thread, wake in list(self._threads.items()):
            wake.set()
            thread.join()

    def _answer(self, sender: ResponseSender, wake: threading.Event, values: Array, delays: Array) -> None:
        sender.watch(on_cancel=wake.set)
        try:
            for index, value in enumerate(values):
                if wake.wait(float(delays[index]) * _MS) or self._is_closing:
                    break
                sender.send(
                    InferResponse(
                        [
                            Tensor("OUT", Datatype.INT32, np.array([value], np.int32)),
                            Tensor("IDX", Datatype.UINT32, np.array([index], np.uint32)),
                        ]
                    )
                )
            sender.finish()
        except InternalError:
            pass  # the server has ended the request, so the rest is not needed
        finally:
            del self._threads[threading.current_thread()]


class RepeatBackend(Backend):
    option_names = frozenset[str]()

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        config = context.config
        if config.max_batch_size > 0:
            raise ConfigError(
                f"the repeat backend forms no batches: max_batch_size must be 0, not {config.max_batch_size}"
            )
        for given, expected in (
            ({spec.name for spec in config.input}, {"IN", "DELAY", "WAIT"}),
            ({spec.name for spec in config.output}, {"OUT", "IDX"}),
        ):
            if given != expected:
                raise ConfigError(f"the repeat backend expected tensors {sorted(expected)}, got {sorted(given)}")

    def create_instance(self, placement: Placement) -> RepeatInstance:
        return RepeatInstance(placement.name, is_decoupled=self.context.config.is_decoupled)


BACKEND = RepeatBackend
