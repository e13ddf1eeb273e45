"""Metric options in a model's config."""

from __future__ import annotations

from modelserver.config.schema import ModelConfig

FIRST_RESPONSE_MS = "nv_inference_first_response_histogram_ms"
# Triton's.
_FIRST_RESPONSE_BOUNDS_MS = (100.0, 500.0, 2000.0, 5000.0)


def first_response_bounds_ms(config: ModelConfig) -> tuple[float, ...]:
    """The upper bounds of the buckets of first-response times: the config's, or Triton's."""
    for control in config.model_metrics.metric_control if config.model_metrics is not None else ():
        family = control.metric_identifier.family if control.metric_identifier is not None else ""
        if family == FIRST_RESPONSE_MS and control.histogram_options is not None:
            return control.histogram_options.buckets
    return _FIRST_RESPONSE_BOUNDS_MS
