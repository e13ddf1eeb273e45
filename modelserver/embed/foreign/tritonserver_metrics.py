"""A program's own metrics by the names of Triton's in-process API: counters and gauges, in families."""

from __future__ import annotations

import contextlib
import enum
from collections import deque
from collections.abc import Mapping
from typing import Any

from prometheus_client.core import Metric as PageFamily

from modelserver.embed.foreign.tritonserver_tensor import InvalidArgumentError, UnsupportedError, translated
from modelserver.errors import ServerError
from modelserver.telemetry.model_metrics import ModelMetricsBoard

# As in Triton, metrics are the process's: all of its servers show them.
_BOARD = ModelMetricsBoard()
_OWNER = object()
# Those of objects that are gone. The interpreter may drop an object while the board is locked.
_dropped: deque[int] = deque()


class MetricKind(enum.IntEnum):
    COUNTER = 0
    GAUGE = 1


class MetricFamily:
    """Metrics of one name, which differ by their labels. It is on the page while it, or a metric of it, is referred to.

    To make it again with the same name gives the same one. Raises InvalidArgumentError for a name that Prometheus does
    not allow, AlreadyExistsError for a name with another kind.
    """

    def __init__(self, kind: MetricKind, name: str, description: str) -> None:
        if not isinstance(kind, MetricKind):
            raise TypeError(f"kind: expected a MetricKind, got {kind!r:.100}")
        self.kind = kind
        self._handle = _ask("metric_family", name=name, description=description, kind=kind.name.lower())

    def __del__(self) -> None:
        if "_handle" in self.__dict__:
            _dropped.append(self._handle)


class Metric:
    """A number of a family, from 0 on. Raises InvalidArgumentError for labels that Prometheus does not allow."""

    def __init__(self, family: MetricFamily, labels: Mapping[str, str] | None = None) -> None:
        given = dict(labels or {})
        if not all(isinstance(name, str) and isinstance(value, str) for name, value in given.items()):
            raise InvalidArgumentError(f"labels are texts by their names, got {given!r:.200}")
        self._family = family
        self._handle = _ask("metric_new", family=family._handle, labels=given, buckets=())

    @property
    def kind(self) -> MetricKind:
        return self._family.kind

    @property
    def value(self) -> float:
        return float(_ask("metric_value", handle=self._handle))

    def increment(self, value: float) -> None:
        """Add to it. Raises InvalidArgumentError for a counter and a negative number."""
        if self.kind is MetricKind.COUNTER and value < 0:
            raise InvalidArgumentError(f"a counter can only be incremented by non-negative values, got {value}")
        _ask("metric_add", handle=self._handle, value=value)

    def set_value(self, value: float) -> None:
        """Replace the number. Raises UnsupportedError for a counter."""
        if self.kind is MetricKind.COUNTER:
            raise UnsupportedError("a counter does not support set_value: use increment, or a MetricKind.GAUGE")
        _ask("metric_set", handle=self._handle, value=value)

    def __del__(self) -> None:
        if "_handle" in self.__dict__:
            _dropped.append(self._handle)


def families() -> list[PageFamily]:
    """All of them, by name."""
    _drop()
    return _BOARD.families()


def _ask(topic: str, **arguments: Any) -> Any:
    _drop()
    try:
        return _BOARD.ask(_OWNER, topic, arguments)
    except ServerError as error:
        raise translated(error) from error


def _drop() -> None:
    with contextlib.suppress(IndexError):
        while True:
            _BOARD.ask(_OWNER, "metric_drop", {"handle": _dropped.popleft()})
