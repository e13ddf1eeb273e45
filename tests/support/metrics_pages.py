"""Pages of metrics as scrapers get them."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric

from modelserver.core.long_work import finish
from modelserver.telemetry.exposition import openmetrics_slices, text_slices


def render_text(families: Iterable[Metric]) -> bytes:
    """In Prometheus' text format."""
    return b"".join(finish(text_slices(families)))


def render_openmetrics(families: Iterable[Metric]) -> bytes:
    """In OpenMetrics' text format."""
    return b"".join(finish(openmetrics_slices(families)))
