"""How answers are framed."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

from modelserver.protocol.response import ErrorWriter


class EventErrors(ErrorWriter):
    """The form of an API's errors, also within an answer that has begun."""

    @abc.abstractmethod
    def document(self, error: Exception) -> dict[str, Any]:
        """The error as a document, to be framed as an event or a line. What is not a ServerError is logged."""

    @abc.abstractmethod
    def placed(self, error: Exception, document: Mapping[str, Any]) -> Exception:
        """The error, naming what of the request's `document` is wrong, where it is a model's refusal."""
