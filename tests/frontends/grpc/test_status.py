from __future__ import annotations

from urllib.parse import quote

import grpc
import pytest

from modelserver.errors import ErrorCode, NotFoundError, ServerError
from modelserver.protocol.grpc_status import STATUS_OF, Status, status_of


@pytest.mark.parametrize("code", ErrorCode)
def test_every_code_has_a_status(code: ErrorCode) -> None:
    assert STATUS_OF[code] is not Status.OK


@pytest.mark.parametrize("status", Status)
def test_names_and_numbers_are_those_of_grpc(status: Status) -> None:
    assert grpc.StatusCode[status.name].value[0] == status


def test_message_of_usual_length_is_left_alone() -> None:
    assert status_of(NotFoundError("no model 'x'")) == (Status.NOT_FOUND, "no model 'x'")


@pytest.mark.parametrize("character", ["x", "\u00e9", "\U0001f600", "\ud800", "%"])
def test_long_message_is_shortened_to_what_trailers_can_hold(character: str) -> None:
    _, message = status_of(ServerError(character * 10_000))
    assert len(quote(message, safe=" ?")) < 7000
    kept = message.index(" ...")
    assert message.endswith(f" ... ({10_000 - kept} more characters)")


def test_surrogates_are_replaced() -> None:
    assert status_of(ServerError("\udcff.py")) == (Status.UNKNOWN, "?.py")
