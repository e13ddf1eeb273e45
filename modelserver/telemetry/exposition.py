"""Metric families as text: Prometheus' format 0.0.4 and OpenMetrics 1.0.

prometheus_client's own writers put `_total` behind every counter, and dashboards made for Triton ask for
`nv_inference_count`. Names are therefore written as they are; in OpenMetrics, which forbids such counters,
they are of unknown type, so that a scraper that negotiates it finds the same names.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from modelserver.core.long_work import Slices, finish

TEXT_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LAST_LABELS = frozenset({"le", "quantile"})
OPENMETRICS_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def render_text(families: Iterable[Metric]) -> bytes:
    """The families in Prometheus' text format; those without a value are left out."""
    return finish(text_slices(families))


def text_slices(families: Iterable[Metric]) -> Slices[bytes]:
    """As `render_text`, in slices."""
    lines: list[str] = []
    for family in filter(_has_samples, families):
        kind = {"unknown": "untyped", "info": "gauge"}.get(family.type, family.type)
        name = exposed_name(family)
        lines.append(f"# HELP {name} {_escape_help(family.documentation)}")
        lines.append(f"# TYPE {name} {kind}")
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                lines.append(_line(sample))
                yield
    return ("\n".join(lines) + "\n").encode()


def render_openmetrics(families: Iterable[Metric]) -> bytes:
    """The families in OpenMetrics' text format; those without a value are left out."""
    return finish(openmetrics_slices(families))


def openmetrics_slices(families: Iterable[Metric]) -> Slices[bytes]:
    """As `render_openmetrics`, in slices."""
    lines: list[str] = []
    for family in filter(_has_samples, families):
        is_plain_counter = family.type == "counter" and any(
            not sample.name.endswith(("_total", "_created")) for sample in family.samples
        )
        kind = "unknown" if is_plain_counter else family.type
        lines.append(f"# HELP {family.name} {_escape_value(family.documentation)}")
        lines.append(f"# TYPE {family.name} {kind}")
        for sample in family.samples:
            lines.append(_line(sample))
            yield
    return ("\n".join(lines) + "\n# EOF\n").encode()


def exposed_name(family: Metric) -> str:
    """The name under which the text format has the family, which must be there once."""
    if family.type in ("counter", "info") and family.samples:
        return str(family.samples[0].name)
    return str(family.name)


def accepts_openmetrics(accept: str) -> bool:
    """Whether an Accept header asks for OpenMetrics."""
    return any(part.split(";")[0].strip() == "application/openmetrics-text" for part in accept.split(","))


def _has_samples(family: Metric) -> bool:
    return bool(family.samples)


def _line(sample: Sample) -> str:
    # Triton's order: a script that reads lines finds them.
    names = sorted(sample.labels, key=_label_rank)
    labels = ",".join(f'{name}="{_escape_value(sample.labels[name])}"' for name in names)
    head = f"{sample.name}{{{labels}}}" if labels else sample.name
    return f"{head} {_number(sample.value)}"


def _label_rank(name: str) -> tuple[bool, str]:
    return name in _LAST_LABELS, name


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _escape_value(text: str) -> str:
    return _escape_help(text).replace('"', '\\"')
