"""Findings about this machine: the lines of `modelserver doctor`."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FindingLevel(enum.Enum):
    """The severity. A PROBLEM prevents a feature from working; a WARNING may."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One checked item: its name (`subject`), its state (`found`), and what to do about it (`advice`)."""

    level: FindingLevel
    subject: str
    found: str
    advice: str = ""
