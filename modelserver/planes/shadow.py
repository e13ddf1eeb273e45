"""Copies of requests for shadow versions, whose answers are only compared with the answers that clients got.

A copy costs the client nothing but its share of the machine: it is made after the request was submitted, and dropped if
its version cannot take it or already has many.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, RelayStream, ResponseStream
from modelserver.core.tensor import Tensor
from modelserver.errors import ServerError
from modelserver.execution.model import Model
from modelserver.telemetry.counts import ShadowCounts, ShadowResult

_logger = logging.getLogger(__name__)

# Copies of one version that may be in flight; further ones are skipped.
_MAX_INFLIGHT = 64
# More bytes than this are compared in a thread, not on the event loop.
_LOOP_BYTES = 256 << 10


@dataclass(slots=True)
class _Answers:
    """The two answers to compare, as they arrive; None stands for one that cannot be compared."""

    given: list[Tensor] | None = None
    shadow: list[Tensor] | None = None
    has_given: bool = False
    has_shadow: bool = False


class Shadows:
    """Makes the copies and counts their results. Event loop thread only."""

    def __init__(self, counts: ShadowCounts) -> None:
        self.counts = counts
        self._inflight: Counter[tuple[str, int]] = Counter()
        self._comparisons: set[asyncio.Future[bool]] = set()

    def watch(self, request: InFlightRequest) -> _GivenStream:
        """Put a relay before the reader of a request that is to be copied."""
        stream = _GivenStream(request.stream)
        request.stream = stream
        return stream

    def copy(self, request: InFlightRequest, given: _GivenStream, model: Model, tolerance: float) -> None:
        """Give `model` a copy of a submitted request; `given` receives the client's answer."""
        key = (model.name, model.version)
        if self._inflight[key] >= _MAX_INFLIGHT:
            self.counts.record(*key, ShadowResult.SKIPPED)
            return
        comparison = _Comparison(self, key, tolerance)
        copied = InFlightRequest(
            model_name=request.model_name,
            version=model.version,
            inputs=dict(request.inputs),
            id=request.id,
            outputs=request.outputs,
            parameters=dict(request.parameters),
            priority=request.priority,
            stream=_ShadowStream(comparison),
            caller=request.caller,
            share=request.share,
        )
        self._inflight[key] += 1
        try:
            model.infer(copied)
        except ServerError as error:
            _logger.debug("the shadow version of model '%s', %d, did not accept a copy: %s", *key, error.message)
            self.finish(key, ShadowResult.SKIPPED)
        else:
            given.add(comparison)

    def finish(self, key: tuple[str, int], result: ShadowResult) -> None:
        """A copy has ended."""
        self._inflight[key] -= 1
        self.counts.record(*key, result)

    def compare(self, key: tuple[str, int], answers: _Answers, tolerance: float) -> None:
        """Find out whether both answers are equal, in a thread if they are large."""
        given, shadow = answers.given, answers.shadow
        if given is None or shadow is None:
            self.finish(key, ShadowResult.UNCOMPARED)
        elif sum(tensor.data.nbytes for tensor in given) <= _LOOP_BYTES:
            self._count(key, are_equal(given, shadow, tolerance))
        else:
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(None, are_equal, given, shadow, tolerance)
            self._comparisons.add(future)

            def done(future: asyncio.Future[bool]) -> None:
                self._comparisons.discard(future)
                self._count(key, not future.cancelled() and future.exception() is None and future.result())

            future.add_done_callback(done)

    def _count(self, key: tuple[str, int], is_equal: bool) -> None:
        self.finish(key, ShadowResult.EQUAL if is_equal else ShadowResult.DIFFERENT)


class _Comparison:
    """Holds both answers until they are compared."""

    def __init__(self, shadows: Shadows, key: tuple[str, int], tolerance: float) -> None:
        self._shadows = shadows
        self._key = key
        self._tolerance = tolerance
        self._answers = _Answers()
        self._has_failed = False

    def on_given(self, outputs: list[Tensor] | None) -> None:
        self._answers.given, self._answers.has_given = outputs, True
        self._settle()

    def on_shadow(self, outputs: list[Tensor] | None, *, has_failed: bool) -> None:
        self._answers.shadow, self._answers.has_shadow = outputs, True
        self._has_failed = has_failed
        self._settle()

    def _settle(self) -> None:
        answers = self._answers
        if not (answers.has_given and answers.has_shadow):
            return
        if self._has_failed and answers.given is not None:
            self._shadows.finish(self._key, ShadowResult.FAILED)
        else:
            self._shadows.compare(self._key, answers, self._tolerance)


class _Sole:
    """The outputs of a request that is answered once; None for any other."""

    __slots__ = ("has_failed", "num_answers", "outputs")

    def __init__(self) -> None:
        self.outputs: list[Tensor] | None = None
        self.num_answers = 0
        self.has_failed = False

    def add(self, response: InferResponse) -> None:
        if response.error is not None:
            self.has_failed = True
        elif response.outputs:
            self.num_answers += 1
            self.outputs = list(response.outputs)

    @property
    def result(self) -> list[Tensor] | None:
        return self.outputs if self.num_answers == 1 and not self.has_failed else None


class _GivenStream(RelayStream):
    """Passes the answer on to the client and to the comparisons."""

    __slots__ = ("_comparisons", "_sole")

    def __init__(self, reader: ResponseStream) -> None:
        super().__init__(reader)
        self._comparisons: list[_Comparison] = []
        self._sole = _Sole()

    def add(self, comparison: _Comparison) -> None:
        """Add a comparison; the answer may already be complete."""
        if self.is_finished:
            comparison.on_given(self._sole.result)
        else:
            self._comparisons.append(comparison)

    def pass_on(self, response: InferResponse) -> InferResponse:
        self._sole.add(response)
        if response.is_final:
            for comparison in self._comparisons:
                comparison.on_given(self._sole.result)
            self._comparisons = []
        return response


class _ShadowStream(ResponseStream):
    """The reader of a copy, which no client reads."""

    __slots__ = ("_comparison", "_sole")

    def __init__(self, comparison: _Comparison) -> None:
        super().__init__()
        self._comparison = comparison
        self._sole = _Sole()

    def deliver(self, response: InferResponse) -> None:
        if self.is_finished:
            return
        self._sole.add(response)
        self.is_finished = response.is_final
        if response.is_final:
            self._comparison.on_shadow(self._sole.result, has_failed=self._sole.has_failed)


def are_equal(given: Sequence[Tensor], shadow: Sequence[Tensor], tolerance: float) -> bool:
    """Whether two answers have the same outputs of the same values, numbers with a point within the tolerance."""
    others = {tensor.name: tensor for tensor in shadow}
    return len(others) == len(given) and all(
        tensor.name in others and _is_equal(tensor, others[tensor.name], tolerance) for tensor in given
    )


def _is_equal(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if one.datatype is not other.datatype or one.data.shape != other.data.shape:
        return False
    left: Any = one.data
    right: Any = other.data
    if one.datatype is Datatype.BYTES or left.dtype.kind not in "fc":
        return bool(np.array_equal(left, right))
    return bool(np.allclose(left, right, rtol=tolerance, atol=tolerance, equal_nan=True))
