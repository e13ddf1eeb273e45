"""Metric families as text: Prometheus' format 0.0.4 and OpenMetrics 1.0.

prometheus_client's own writers put `_total` behind every counter, and dashboards made for Triton ask for
`nv_inference_count`. Names are therefore written as they are; in OpenMetrics, which forbids such counters,
they are of unknown type, so that a scraper that negotiates it finds the same names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from modelserver.core.long_work import Slices

TEXT_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_LAST_LABELS = frozenset({"le", "quantile"})
_WHOLE_BOUND = re.compile(r'(\ble="\d+)\.0"')


class SampleBlock(NamedTuple):
    """Samples of one family as lines of both formats, each line with its end, and the name of the first sample."""

    sample_name: str
    text: bytes
    openmetrics: bytes


class JoinedBlocks:
    """The blocks of one family and of many models as one: joined when a page in that format is made, then kept."""

    def __init__(self, blocks: Sequence[SampleBlock]) -> None:
        self.sample_name = blocks[0].sample_name
        self._blocks = blocks

    @cached_property
    def text(self) -> bytes:
        return b"".join([block.text for block in self._blocks])

    @cached_property
    def openmetrics(self) -> bytes:
        return b"".join([block.openmetrics for block in self._blocks])


class RenderedFamily(Metric):
    """A family with samples that are lines already, kept between scrapes: at least one block.

    Other samples may be added as to any `Metric`.
    """

    def __init__(self, head: Metric, blocks: Sequence[SampleBlock | JoinedBlocks]) -> None:
        super().__init__(head.name, head.documentation, head.type)
        self.sample_name = blocks[0].sample_name
        self.blocks = blocks


def sample_block(metric: Metric) -> SampleBlock:
    """The samples of a family that has some."""
    lines = "".join([f"{_line(sample)}\n" for sample in metric.samples])
    text = _with_short_bounds(lines)
    openmetrics = lines.encode()
    return SampleBlock(metric.samples[0].name, openmetrics if text == lines else text.encode(), openmetrics)


class _Page:
    """Lines, and blocks of lines that are kept as they are: a page of thousands of models is never copied."""

    def __init__(self) -> None:
        self._buffers: list[bytes] = []
        self._lines: list[str] = []
        self.add_line = self._lines.append

    def add_block(self, block: bytes) -> None:
        self._end_lines()
        self._buffers.append(block)

    def buffers(self) -> tuple[bytes, ...]:
        self._end_lines()
        return tuple(self._buffers)

    def _end_lines(self) -> None:
        if self._lines:
            self._buffers.append(("\n".join(self._lines) + "\n").encode())
            self._lines.clear()


def text_slices(families: Iterable[Metric]) -> Slices[tuple[bytes, ...]]:
    """The families in Prometheus' text format, as buffers to be written one after the other; those without a value are
    left out."""
    page = _Page()
    for family in filter(has_samples, families):
        kind = {"unknown": "untyped", "info": "gauge"}.get(family.type, family.type)
        name = exposed_name(family)
        page.add_line(f"# HELP {name} {_escape_help(family.documentation)}")
        page.add_line(f"# TYPE {name} {kind}")
        if isinstance(family, RenderedFamily):
            for block in family.blocks:
                page.add_block(block.text)
            yield
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                page.add_line(_with_short_bounds(_line(sample)))
                yield
    return page.buffers()


def openmetrics_slices(families: Iterable[Metric]) -> Slices[tuple[bytes, ...]]:
    """The families in OpenMetrics' text format, as buffers to be written one after the other; those without a value are
    left out."""
    page = _Page()
    for family in filter(has_samples, families):
        names = {sample.name for sample in family.samples}
        if isinstance(family, RenderedFamily):
            names.add(family.sample_name)
        is_plain_counter = family.type == "counter" and any(not name.endswith(("_total", "_created")) for name in names)
        kind = "unknown" if is_plain_counter else family.type
        page.add_line(f"# HELP {family.name} {_escape_value(family.documentation)}")
        page.add_line(f"# TYPE {family.name} {kind}")
        if isinstance(family, RenderedFamily):
            for block in family.blocks:
                page.add_block(block.openmetrics)
            yield
        for sample in family.samples:
            page.add_line(_line(sample))
            yield
    page.add_line("# EOF")
    return page.buffers()


def exposed_name(family: Metric) -> str:
    """The name under which the text format has the family, which must be there once."""
    if family.type in ("counter", "info"):
        if isinstance(family, RenderedFamily):
            return family.sample_name
        if family.samples:
            return str(family.samples[0].name)
    return str(family.name)


def accepts_openmetrics(accept: str) -> bool:
    """Whether an Accept header asks for OpenMetrics."""
    return any(part.split(";")[0].strip() == "application/openmetrics-text" for part in accept.split(","))


def has_samples(family: Metric) -> bool:
    """Whether the page has a line of the family."""
    return bool(family.samples) or isinstance(family, RenderedFamily)


def _line(sample: Sample) -> str:
    return f"{sample.name}{_labels(tuple(sample.labels.items()))} {_number(sample.value)}"


@lru_cache(maxsize=1024)  # the families of a model share its labels, and histograms their bounds
def _labels(labels: tuple[tuple[str, str], ...]) -> str:
    """In Triton's order: a script that reads lines finds them."""
    ordered = sorted(labels, key=lambda label: _label_rank(label[0]))
    text = ",".join(f'{name}="{_escape_value(value)}"' for name, value in ordered)
    return f"{{{text}}}" if text else ""


def _with_short_bounds(lines: str) -> str:
    """A bucket's bound is `1` in Triton's text, where OpenMetrics demands `1.0`."""
    return _WHOLE_BOUND.sub(r'\1"', lines) if "_bucket{" in lines else lines


def _label_rank(name: str) -> tuple[bool, str]:
    return name in _LAST_LABELS, name


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _escape_value(text: str) -> str:
    return _escape_help(text).replace('"', '\\"')
