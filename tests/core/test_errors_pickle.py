"""Errors that a model's own pools carry between processes: what cannot be unpickled hangs a pool."""

from __future__ import annotations

import pickle

import pytest

from modelserver.config.problem import Problem
from modelserver.errors import ConfigError, ErrorCode, ServerError
from modelserver.execution.process.channel import PeerGoneError


def _all_kinds(kind: type[ServerError]) -> list[type[ServerError]]:
    return [kind, *(each for child in kind.__subclasses__() for each in _all_kinds(child))]


@pytest.mark.parametrize("kind", _all_kinds(ServerError), ids=lambda kind: kind.__name__)
def test_errors_survive_pickling(kind: type[ServerError]) -> None:
    error = kind.__new__(kind, "no")
    error.message = "no"
    error.retry_after_s = 2.0
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), copy.message, copy.retry_after_s, copy.code) == ("no", "no", 2.0, kind.code)


def test_codes_and_problems_survive_pickling() -> None:
    copy = pickle.loads(pickle.dumps(ServerError("no", code=ErrorCode.NOT_FOUND)))
    assert copy.code is ErrorCode.NOT_FOUND
    problem = Problem("config.pbtxt", 1, 2, "name", "expected a name", None)
    config_error = pickle.loads(pickle.dumps(ConfigError("no", problems=[problem])))
    assert config_error.problems[0].field == "name"


@pytest.mark.parametrize("was_unread", [True, False])
def test_the_end_of_a_peer_survives_pickling(was_unread: bool) -> None:
    copy = pickle.loads(pickle.dumps(PeerGoneError(was_unread=was_unread)))
    assert copy.was_unread is was_unread
