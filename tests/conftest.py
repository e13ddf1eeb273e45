"""Fixtures that all rooms share: one server over the example models, both protocols as one, no leaks."""

from __future__ import annotations

import gc
import os
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from support.leaks import no_leaks

# Fixtures import what they need when they are used, so that one room's tests run without the other rooms.
if TYPE_CHECKING:
    from support.clients import ProtocolClient
    from support.serving import RunningServer

# The same examples in every run, and no time limit on one: a busy machine is no bug.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.load_profile("suite")

FEWEST_EXAMPLES = 30

ROOT = Path(__file__).resolve().parent.parent


# Parameters that only run a test once more elsewhere, and the values of which a quick run takes one for each test.
REPEATS = {
    "layout": ("native-one-port", "grpcio"),  # all tests run on the layout `native` as well
    "any_layout": ("native", "native-processes"),
    "ports": ("native", "native-processes", "grpcio"),
    "loop_name": ("asyncio", "uvloop"),
    "wire": ("asyncio", "uvloop"),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Repetitions are slow. Tests that need programs of others are not there on machines that lack them, nor those of
    what a router answers itself where all servers have one."""
    from support.tools import find_tool

    is_quick = config.option.markexpr == "not slow"
    if config.option.layout == "routed":
        items[:] = [item for item in items if item.get_closest_marker("direct") is None]
    for item in items:
        if is_quick and isinstance(item, pytest.Function) and hypothesis.is_hypothesis_test(item.obj):
            _take_fewer_examples(getattr(item.obj, "__func__", item.obj))
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            chosen = zlib.crc32(f"{item.path.name}::{item.originalname}".encode())
            for name, values in REPEATS.items():
                value = item.callspec.params.get(name)
                if value in values and value != values[chosen % len(values)]:
                    item.add_marker(pytest.mark.slow)

    there, absent = [], []
    for item in items:
        names = [name for mark in item.iter_markers("tool") for name in mark.args]
        (there if all(find_tool(name) for name in names) else absent).append(item)
    if absent:
        config.hook.pytest_deselected(items=absent)
        items[:] = there


def _take_fewer_examples(test: Any) -> None:
    """A third of what the nightly run tries. Called for each set of a test's parameters, and counts once."""
    given = getattr(test, "_hypothesis_internal_use_settings", None)  # there is no public way to read what was given
    if given is not None and not hasattr(test, "has_fewer_examples") and given.max_examples > FEWEST_EXAMPLES:
        fewer = max(FEWEST_EXAMPLES, given.max_examples // 3)
        test._hypothesis_internal_use_settings = hypothesis.settings(given, max_examples=fewer)
    test.has_fewer_examples = True


# What takes longest in `make test`, the longest first.
LONG_FILES = (
    "protocol/test_repository_control.py",
    "backends/llm/test_exactness.py",
    "wire/processes/test_server.py",
    "execution/process/test_instance.py",
    "protocol/test_llm.py",
    "backends/llm/attention/test_sdpa.py",
    "wire/processes/test_life.py",
    "backends/llm/test_tensor_parallel.py",
    "backends/test_damaged_files.py",
    "backends/llm/attention/test_cpu_attention.py",
    "protocol/test_python_models.py",
    "wire/sockets/test_tls_transport.py",
    "repository/test_reload_under_load.py",
    "backends/llm/models/test_load.py",
    "backends/python/test_environment.py",
    "execution/process/test_step_host.py",
    "protocol/test_repository_namespaces.py",
)


class LongFilesFirst:
    """Deals files out to several processes so that none is left with a long one in the end.

    xdist would begin with those of many tests, and some of the longest have few.
    """

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        tests = ROOT / "tests"
        ranks = {tests / name: rank for rank, name in enumerate(LONG_FILES)}
        if absent := [str(path) for path in ranks if not path.exists()]:
            raise pytest.UsageError(f"LONG_FILES of tests/conftest.py names files that do not exist: {absent}")
        counts = Counter(item.path for item in items)
        items.sort(key=lambda item: (ranks.get(item.path, len(ranks)), -counts[item.path], item.path))


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--layout routed`: the tests of any room, with a router in front of each server."""
    from support import layouts

    parser.addoption("--layout", choices=layouts.LAYOUTS, help="of servers that tests start where no test chooses one")


def pytest_configure(config: pytest.Config) -> None:
    from support import layouts

    if config.option.layout:
        layouts.choose(config.option.layout)
    # An HTTP client would read the 150 certificates that it trusts, which takes 30 ms, and no test is on the web.
    os.environ.setdefault("SSL_CERT_DIR", str(ROOT / "tests"))
    if hasattr(config, "workerinput"):  # one of xdist's processes
        config.pluginmanager.register(LongFilesFirst())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Millions of objects stay to the end. The collector need not walk them each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """The whole run leaves no thread, process, port or memory."""
    with no_leaks():
        yield


@pytest.fixture(scope="session")
def model_repository() -> Path:
    """The example models that the project ships."""
    return ROOT / "model_repository"


@pytest.fixture(scope="session")
def server(model_repository: Path) -> Iterator[RunningServer]:
    """One server over the example models, for tests that only ask it."""
    from support.serving import running_server

    with running_server(model_repository) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def protocol(request: pytest.FixtureRequest) -> type[ProtocolClient]:
    """The client class of each protocol in turn: `protocol(running_server)` is a connected client."""
    from support.clients import GrpcClient, HttpClient

    return {"http": HttpClient, "grpc": GrpcClient}[request.param]


@pytest.fixture
def client(protocol: type[ProtocolClient], server: RunningServer) -> Iterator[ProtocolClient]:
    """A client of the session's server, over each protocol in turn."""
    with protocol(server) as connected:
        yield connected
