"""The files of docker/, as the tests of deployment read them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
DOCKER = ROOT / "docker"
CHART = DOCKER / "helm" / "modelserver"
# Words of a query that look like metrics and are none: functions, aggregations, keywords.
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_SELECTOR = re.compile(r"\{[^}]*\}")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_DURATION = re.compile(r"\[[^\]]*\]")
_WORDS = frozenset(
    {"and", "or", "unless", "time", "vector", "sum", "min", "max", "avg", "count", "by", "group_left", "Inf", "NaN"}
)
# What a scrape or a rule makes, not the server.
_OF_PROMETHEUS = frozenset({"up"})


def read_yaml(path: Path) -> Any:
    """The one document of a file."""
    return yaml.safe_load(path.read_text())


def metrics_of(query: str) -> set[str]:
    """The names of the metrics that a PromQL query asks for."""
    bare = _GROUPING.sub(" ", _DURATION.sub(" ", _SELECTOR.sub(" ", query)))
    names = {
        match.group()
        for match in _NAME.finditer(bare)
        if not bare[match.end() :].lstrip().startswith("(") and not bare[: match.start()].endswith(tuple("0123456789."))
    }
    return names - _WORDS - _OF_PROMETHEUS
