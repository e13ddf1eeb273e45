"""Requests that no scheduler takes, whatever its kind."""

from __future__ import annotations

from modelserver.core.request import InFlightRequest
from modelserver.errors import CancelledError, QueueTimeoutError, ServerError, UnavailableError
from modelserver.telemetry.statistics import ModelStatistics
from modelserver.telemetry.statistics_snapshot import FailureReason


def refuse(
    request: InFlightRequest, model_name: str, statistics: ModelStatistics, now_ns: int, *, is_stopped: bool
) -> ServerError | None:
    """Why the request cannot be accepted, recorded as a failure; None when it can."""
    error: ServerError
    if is_stopped:
        reason = FailureReason.OTHER
        error = UnavailableError(
            "Server is stopping, scheduler for model has stopped accepting new inference requests: "
            f"model '{model_name}' is being unloaded"
        )
    elif request.is_cancelled:
        reason = FailureReason.CANCELED
        error = CancelledError(f"request to model '{model_name}' was cancelled")
    elif request.deadline_ns is not None and request.deadline_ns <= now_ns:
        reason = FailureReason.REJECTED
        error = QueueTimeoutError(
            f"Request timeout expired: its deadline passed before the queue of model '{model_name}'"
        )
    else:
        return None
    statistics.record_failures(reason, (now_ns - request.arrival_ns,))
    return error
