"""What a front process is told of the APIs whose calls it takes."""

from __future__ import annotations

import logging

import pytest

from modelserver.app.frontends import http_apis
from modelserver.app.server import Server
from modelserver.frontends.http.metrics import Metrics
from modelserver.options.server_options import ServerOptions
from modelserver.protocol.api import Api
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import PlainErrors
from modelserver.telemetry.load_page import LoadPage
from modelserver.wire.processes.setup import CorePlanes, FrontSetup


class WithState(PlainErrors):
    def __init__(self, language: str) -> None:
        self.language = language


class WithSlots(PlainErrors):
    __slots__ = ("language",)


def sent(*apis: Api) -> FrontSetup:
    """As a front receives it."""
    calls = CorePlanes(Server(ServerOptions()).dataplane, None, None, apis).calls()
    return FrontSetup.from_arguments(FrontSetup((), calls=calls).arguments())


async def test_a_front_writes_the_errors_of_all_our_apis() -> None:
    server = Server(ServerOptions())
    page = Metrics(lambda: iter(()), LoadPage(tuple)).api()
    apis = (*http_apis(server.dataplane, server.controlplane, HttpLimits()), page)
    writers = [api.error_writer() for api in sent(*apis).calls.apis]
    assert [type(writer) for writer in writers] == [type(api.errors) for api in apis]


async def test_only_classes_that_have_no_state_and_a_name_are_made_there(caplog: pytest.LogCaptureFixture) -> None:
    class Local(PlainErrors): ...

    apis = [Api("a", (), errors) for errors in (WithState("en"), WithSlots(), Local())]
    assert [api.errors for api in sent(*apis).calls.apis] == ["", "", ""]
    assert [api.error_writer() for api in sent(*apis).calls.apis] == [None, None, None]
    caplog.set_level(logging.WARNING)
    (known,) = sent(Api("a", (), PlainErrors())).calls.apis
    object.__setattr__(known, "errors", "no_such_module:Errors")
    assert known.error_writer() is None
    assert "no_such_module" in caplog.text
