from __future__ import annotations

import logging

import pytest
from support.http_calls import read

from modelserver import errors
from modelserver.errors import ErrorCode, InvalidArgumentError, PayloadTooLargeError, ServerError
from modelserver.protocol.response import STATUS, error_response


def test_the_table_is_total() -> None:
    assert set(STATUS) == set(ErrorCode)
    assert all(400 <= status < 600 for status in STATUS.values())


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ServerError("x"), 400),
        (InvalidArgumentError("x"), 400),
        (PayloadTooLargeError("x"), 413),
        (errors.ConfigError("x"), 400),
        (errors.NotFoundError("x"), 404),
        (errors.AlreadyExistsError("x"), 400),
        (errors.UnavailableError("x"), 503),
        (errors.QueueFullError("x"), 503),
        (errors.QueueTimeoutError("x"), 503),
        (ServerError("x", code=ErrorCode.OVERLOADED), 429),
        (ServerError("x", code=ErrorCode.TIMED_OUT), 504),
        (errors.UnsupportedError("x"), 501),
        (errors.CancelledError("x"), 400),
        (errors.InternalError("x"), 500),
    ],
)
def test_every_error_has_triton_s_status(error: ServerError, status: int) -> None:
    answer = read(error_response(error))
    assert answer.status == status
    assert answer.error == "x"
    assert answer.headers["content-type"] == "application/json"


def test_a_fault_of_ours_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        answer = read(error_response(KeyError("secret")))
    assert answer.status == 500
    assert "secret" not in answer.error
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_a_message_with_a_lone_surrogate_is_sent_all_the_same() -> None:
    assert read(error_response(InvalidArgumentError("bad '\ud800'"))).error == "bad '?'"
