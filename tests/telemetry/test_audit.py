"""The audit log's lines: one for each action, with its end, and with nothing that breaks a line."""

from __future__ import annotations

import asyncio
import logging

import pytest

from modelserver.auth.api_keys import CALLER, Scope, create_key
from modelserver.errors import NotFoundError
from modelserver.telemetry.audit import PEER, audited


def test_who_what_and_how_it_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "modelserver.audit")
    _, key = create_key("ci", frozenset({Scope.ADMIN}))
    with audited("load", "a\nb"):
        pass
    token, peer = CALLER.set(key), PEER.set("10.0.0.1")
    with pytest.raises(NotFoundError), audited("load", "x" * 300):
        raise NotFoundError("secret words")
    with pytest.raises(asyncio.CancelledError), audited("unload", ""):
        raise asyncio.CancelledError
    CALLER.reset(token)
    PEER.reset(peer)
    assert [record.getMessage() for record in caplog.records] == [
        'audit: key=- peer=- action="load" target="a\\nb" result=ok',
        f'audit: key="ci" peer=10.0.0.1 action="load" target="{"x" * 200}" result=not_found',
        'audit: key="ci" peer=10.0.0.1 action="unload" target="" result=CancelledError',
    ]
