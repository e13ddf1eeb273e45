"""The audit log: a line for each action on the server, done or refused: caller, action, target and result.

Lines come from the logger `modelserver.audit` at level INFO. Of the values that clients send, only names are logged.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from modelserver.auth.api_keys import CALLER
from modelserver.errors import ServerError

_logger = logging.getLogger("modelserver.audit")

_MAX_NAME_LEN: Final = 200

# The peer of the call in progress, if its wire knows it.
PEER: Final[ContextVar[str]] = ContextVar("modelserver_peer", default="")


@contextmanager
def audited(action: str, target: str) -> Iterator[None]:
    """Write a line for the action in the block on `target`, a model or another object."""
    try:
        yield
    except BaseException as error:
        record(action, target, error)
        raise
    record(action, target)


def record(action: str, target: str, error: BaseException | None = None) -> None:
    """Write a line; `error` is how the action ended, of which only the kind is written."""
    result = "ok" if error is None else type(error).__name__
    if isinstance(error, ServerError):
        result = error.code.value
    key = CALLER.get()
    _logger.info(
        "audit: key=%s peer=%s action=%s target=%s result=%s",
        json.dumps(key.name) if key is not None else "-",
        PEER.get() or "-",
        json.dumps(action[:_MAX_NAME_LEN]),
        json.dumps(target[:_MAX_NAME_LEN]),
        result,
    )
