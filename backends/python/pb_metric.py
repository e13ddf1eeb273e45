"""`pb_utils.MetricFamily` and `Metric`: numbers of a model's own among the server's metrics."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from modelserver.backend import ServerError, child

from .pb_error import TritonModelException, number_of, text_of

_Result = TypeVar("_Result")


class MetricKind(enum.IntEnum):
    """Numbered as in TRITONSERVER_MetricKind."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class MetricFamily:
    """Metrics of one name; those of all models and instances that use the name with equal labels are one."""

    _handle = 0  # of the server; the constructor may fail before it has one

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        """Raises TritonModelException if the name is taken by another kind, or is not a valid metric name."""
        if not isinstance(kind, MetricKind):
            raise TypeError(f"kind must be one of MetricFamily's, got {kind!r}")
        self.kind = kind
        wanted = {
            "name": text_of("name", name),
            "description": text_of("description", description),
            "kind": self.kind.name.lower(),
        }
        self._handle = _asked("Error when creating MetricFamily: ", lambda: child.ask("metric_family", **wanted))

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:  # noqa: N802
        """The metric with these labels; histograms need their buckets' upper bounds, ascending."""
        return Metric(self, self._handle, labels, buckets)

    def __del__(self) -> None:
        if self._handle:
            child.tell_soon("metric_drop", handle=self._handle)


class Metric:
    """One number, or one histogram, for as long as the model holds it and its family."""

    _handle = 0

    def __init__(
        self,
        family: MetricFamily,
        family_handle: int,
        labels: Mapping[str, str] | None,
        buckets: Sequence[float] | None,
    ) -> None:
        self._family = weakref.ref(family)
        self._kind = family.kind
        if labels is not None and not isinstance(labels, Mapping):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        if buckets is not None and not isinstance(buckets, list | tuple):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        if buckets is not None and self._kind is not MetricKind.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        if buckets is None and self._kind is MetricKind.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Missing required buckets.")
        wanted = {
            "family": family_handle,
            "labels": {str(key): str(value) for key, value in (labels or {}).items()},
            "buckets": [float(bound) for bound in buckets or ()],
        }
        self._handle = _asked("Error when creating Metric: ", lambda: child.ask("metric_new", **wanted))

    def increment(self, value: float) -> None:
        """Add to a counter (0 or more) or a gauge."""
        if self._kind is MetricKind.HISTOGRAM:
            raise TritonModelException("Failed to increment metric value: a histogram is observed, not incremented")
        number = number_of("value", value)
        self._check_family()
        if self._kind is MetricKind.COUNTER and not number >= 0:
            raise TritonModelException("Failed to increment metric value: a counter never falls")
        child.tell("metric_add", handle=self._handle, value=number)

    def set(self, value: float) -> None:
        """Set a gauge."""
        if self._kind is not MetricKind.GAUGE:
            raise TritonModelException(
                f"Failed to set metric value: only a gauge is set, this is a {self._kind.name.lower()}"
            )
        self._check_family()
        child.tell("metric_set", handle=self._handle, value=number_of("value", value))

    def observe(self, value: float) -> None:
        """Count a value in a histogram."""
        if self._kind is not MetricKind.HISTOGRAM:
            raise TritonModelException(
                f"Failed to observe metric value: only a histogram observes, this is a {self._kind.name.lower()}"
            )
        self._check_family()
        child.tell("metric_observe", handle=self._handle, value=number_of("value", value))

    def value(self) -> float:
        """The number now, with what all instances added."""
        if self._kind is MetricKind.HISTOGRAM:
            raise TritonModelException("Failed to get metric value: a histogram has no single value")
        self._check_family()
        return float(_asked("Failed to get metric value: ", lambda: child.ask("metric_value", handle=self._handle)))

    def _check_family(self) -> None:
        if self._family() is None:
            raise TritonModelException(
                "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The 'MetricFamily' "
                "object must be deleted after the 'Metric' object is deleted: keep it beside its metrics."
            )

    def __del__(self) -> None:
        if self._handle:
            child.tell_soon("metric_drop", handle=self._handle)


def _asked(failure: str, ask: Callable[[], _Result]) -> _Result:
    try:
        return ask()
    except ServerError as error:
        raise TritonModelException(f"{failure}{error.message}") from error
    except RuntimeError as error:
        raise TritonModelException(f"{failure}metrics can be made inside a model only") from error
