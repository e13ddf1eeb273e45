from __future__ import annotations

import pytest

from modelserver.errors import ErrorCode, InternalError, NotFoundError, ServerError
from modelserver.repository.state import CompletionError, VersionsFailedError, describe_failure


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (InternalError("x"), "Internal: x"),
        (ServerError("x", code=ErrorCode.INVALID_ARGUMENT), "Invalid argument: x"),
        (ServerError("x", code=ErrorCode.NOT_FOUND), "Not found: x"),
    ],
)
def test_failures_are_described_in_tritons_words(error: ServerError, text: str) -> None:
    assert describe_failure(error) == text


def test_whatever_fails_the_request_was_for_what_cannot_be_loaded() -> None:
    error = CompletionError(NotFoundError("no model.py"), (1, 2))
    assert (error.code, error.message) == (ErrorCode.INVALID_ARGUMENT, "no model.py")
    failed = VersionsFailedError("m", dict.fromkeys(error.versions, error.reason))
    assert failed.code is ErrorCode.INVALID_ARGUMENT
    assert failed.message == (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Not found: no model.py; "
        "version 2 is at UNAVAILABLE state: Not found: no model.py;"
    )
