"""The audit log: a line for each thing done to the server, or refused: who, what, to what, and how it ended.

Lines are of the logger `modelserver.audit`, at the level INFO. No value that a client sent is in them but names.
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

# Where the call that is being answered comes from, as far as its wire says so.
PEER: Final[ContextVar[str]] = ContextVar("modelserver_peer", default="")


@contextmanager
def audited(action: str, target: str) -> Iterator[None]:
    """Write the line of what is done within the block to `target`, a model or what the action is about."""
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
