"""Servers behind nginx and HAProxy, configured as docker/proxies says, restart one after the other under load."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.layouts import free_port, layout
from support.model_files import write_identity
from support.processes import ServerProcess, start_serving
from support.rolling import Load, constant_load
from support.tools import tool

PROXIES = Path(__file__).parents[2] / "docker" / "proxies"
CONFIGS = {"nginx": "nginx.conf", "haproxy": "haproxy.cfg"}
# The checks of HAProxy take a second.
DRAIN_DELAY_S = 1.5
# Until a server is asked again that was down: nginx's fail_timeout, HAProxy's rise.
COMES_BACK_S = 1.5


class Fleet:
    """Servers with fixed ports, which are started again and again."""

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        self.ports = [(free_port(), free_port()) for _ in range(2)]
        self.servers: list[ServerProcess] = [self._start(index) for index in range(2)]

    def _start(self, index: int) -> ServerProcess:
        http, grpc = self.ports[index]
        return start_serving(
            self._repository,
            f"--http-port={http}",
            f"--grpc-port={grpc}",
            f"--drain-delay-secs={DRAIN_DELAY_S}",
            "--listen-when-ready",
        )

    def restart(self, index: int) -> None:
        """As an orchestrator does it: the old one leaves in its own time, then the new one comes."""
        server = self.servers[index]
        server.signal()
        assert server.wait() == 0, server.output
        server.close()
        self.servers[index] = self._start(index)
        self.servers[index].wait_until_started()

    def close(self) -> None:
        for server in self.servers:
            server.close()


def config_of(name: str, fleet: Fleet, ports: tuple[int, int], directory: Path) -> str:
    """The documented config, with the addresses of the test."""
    text = (PROXIES / CONFIGS[name]).read_text()
    for number, (http, grpc) in enumerate(fleet.ports, 1):
        text = text.replace(f"server-{number}:8000", f"127.0.0.1:{http}").replace(
            f"server-{number}:8001", f"127.0.0.1:{grpc}"
        )
    for documented, port in zip((8080, 8081), ports, strict=True):
        text = re.sub(rf"(listen|bind) :?{documented}", rf"\1 127.0.0.1:{port}", text)
    if name == "haproxy":
        return text
    temporary = "".join(
        f"    {kind}_temp_path {directory}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    text = text.replace("worker_processes auto", "daemon off;\nworker_processes 1")
    text = text.replace("error_log stderr warn", f"error_log {directory}/error.log warn")
    return text.replace("/run/nginx.pid", f"{directory}/nginx.pid").replace("http {\n", f"http {{\n{temporary}")


@contextmanager
def proxy(name: str, fleet: Fleet, directory: Path) -> Iterator[tuple[str, str]]:
    """The addresses at which it takes HTTP and gRPC."""
    ports = (free_port(), free_port())
    config = directory / CONFIGS[name]
    config.write_text(config_of(name, fleet, ports, directory))
    arguments = {"nginx": ["-p", str(directory), "-c", str(config)], "haproxy": ["-f", str(config)]}[name]
    with (directory / "proxy.log").open("w") as log:
        process = subprocess.Popen([tool(name), *arguments], stdout=log, stderr=log)
        try:
            yield f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}"
        finally:
            process.terminate()
            process.wait(10)


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} within {timeout_s} s"
        time.sleep(0.02)


def go_on(load: Load, num_more: int = 20) -> None:
    """Every kind of client gets some more answers, or fails."""
    before = dict(load.num_answered)
    wait_for(
        lambda: (
            bool(load.failures)
            or all(load.num_answered[kind] >= before.get(kind, 0) + num_more for kind in ("HTTP", "gRPC", "stream"))
        ),
        "all kinds of clients are answered",
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("nginx", marks=pytest.mark.tool("nginx")),
        pytest.param("haproxy", marks=pytest.mark.tool("haproxy")),
    ],
)
@pytest.mark.slow
@pytest.mark.parametrize(("ports", "num_rounds"), [("native", 5), ("native-processes", 3)])
def test_no_request_is_lost(tmp_path: Path, name: str, ports: str, num_rounds: int) -> None:
    more = "instance_group { count: 2 }"
    write_identity(tmp_path / "models", execute_delay_ms=10, creation_delay_sec=0.3, more=more)
    with layout(ports):
        fleet = Fleet(tmp_path / "models")
        try:
            for server in fleet.servers:
                server.wait_until_started()
            with proxy(name, fleet, tmp_path) as urls:
                time.sleep(COMES_BACK_S)  # the proxy finds its servers
                with constant_load(*urls) as load:
                    go_on(load)
                    for _ in range(num_rounds):
                        for index in range(2):
                            fleet.restart(index)
                            time.sleep(COMES_BACK_S)
                            go_on(load)
                assert not load.failures, f"{len(load.failures)}, {load.num_answered} answered: {set(load.failures)}"
        finally:
            fleet.close()
    print(f"{name}, {ports}: {2 * num_rounds} restarts, {dict(load.num_answered)} answered, none lost")
