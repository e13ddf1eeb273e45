"""What a look at this machine found: the lines of `modelserver doctor`."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FindingLevel(enum.Enum):
    """How bad it is. A PROBLEM stops something that somebody wants from working; a WARNING may."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what (`subject`), how it is (`found`), and what to do about it (`advice`)."""

    level: FindingLevel
    subject: str
    found: str
    advice: str = ""
