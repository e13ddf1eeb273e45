"""Every test here runs on each wire and each layout of ports; and both protocols as one, for many in flight."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from support import layouts
from support.async_clients import AsyncClient, AsyncGrpcClient, AsyncHttpClient
from support.serving import RunningServer, running_server

# Both wires and both layouts of ports in each run. What front processes and routers pass on, at night:
# tests/wire/processes and tests/router have them in each run.
_AT_NIGHT = ("native-processes", "routed")
_LAYOUTS = [pytest.param(name, marks=pytest.mark.slow) if name in _AT_NIGHT else name for name in layouts.LAYOUTS]


@pytest.fixture(scope="session", params=_LAYOUTS, autouse=True)
def layout(request: pytest.FixtureRequest) -> str:
    """Each in turn, all tests on one and then all on the next. Fixtures that keep a server ask for it."""
    name: str = request.param
    return name


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `one_layout` are slow on all layouts but the default; those marked `direct` need no router."""
    items[:] = [item for item in items if not (_layout_of(item) == "routed" and item.get_closest_marker("direct"))]
    for item in items:
        if item.get_closest_marker("one_layout") is None or not isinstance(item, pytest.Function):
            continue
        if _layout_of(item) != layouts.DEFAULT:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Servers have the layout of the test that starts them: a fixture of the session would end after the others."""
    with layouts.layout(_layout_of(item)):
        return (yield)


def _layout_of(item: pytest.Item) -> str:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    layout: str = parameters.get("layout", layouts.DEFAULT)
    return layout


@pytest.fixture(scope="session")
def server(layout: str, model_repository: Path) -> Iterator[RunningServer]:
    """One server over the example models, for tests that only ask it."""
    with running_server(model_repository) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def async_protocol(request: pytest.FixtureRequest) -> type[AsyncClient]:
    """The asyncio client class of each protocol in turn."""
    return {"http": AsyncHttpClient, "grpc": AsyncGrpcClient}[request.param]
