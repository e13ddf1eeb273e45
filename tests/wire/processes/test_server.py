"""Ports served by front processes: what clients see, how connections are dealt, and what is left of fronts that end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from support.certificates import Authority
from support.echo import EchoModel, echo_dataplane
from support.fronted import Client, Fronted, fronted
from support.leaks import no_leaks
from support.wires import HOST

from modelserver.errors import InternalError, InvalidArgumentError, UnavailableError
from modelserver.execution.process.recipe import RestartOptions
from modelserver.telemetry.wire_counts import Protocol, Violation
from modelserver.wire.address import Address
from modelserver.wire.limits import TimeLimits, WireLimits
from modelserver.wire.processes.front_process import FrontOptions
from modelserver.wire.processes.server import FrontPort, WireProcesses
from modelserver.wire.processes.setup import CorePlanes
from modelserver.wire.tls import TlsFiles

MIB = 1 << 20
LOST = (ConnectionError, asyncio.IncompleteReadError)


@pytest.fixture(scope="module", params=["uvloop", "asyncio"])
def served(request: pytest.FixtureRequest) -> Iterator[Fronted]:
    """Two fronts, for tests that only ask them."""
    with fronted(loop=request.param) as made:
        yield made


def loads(served: Fronted) -> list[int]:
    return [gauge.num_connections for gauge in served.gauges]


def connections(served: Fronted) -> int:
    return sum(loads(served))


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v2", b""),
        ("GET", "/v2/health/ready", b""),
        ("GET", "/v2/models/echo/config", b""),
        ("GET", "/v2/models/none", b""),
        ("GET", "/nowhere", b""),
        ("POST", "/v2/models/echo/infer", b"{}"),
        (
            "POST",
            "/v2/models/echo/infer",
            b'{"id":"1","inputs":[{"name":"INPUT","datatype":"FP32","shape":[2],"data":[1,2]}]}',
        ),
    ],
)
def test_fronts_answer_as_a_lone_server_does(served: Fronted, method: str, path: str, body: bytes) -> None:
    answers = []
    for port in (served.port, served.processes.wires[1].port, served.alone.port):
        response = httpx.request(method, f"http://{HOST}:{port}{path}", content=body)
        answers.append((response.status_code, dict(response.headers), response.content))
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("size", [0, 1, 4096, MIB // 4, 4 * MIB])
async def test_tensors_of_every_size_come_back(served: Fronted, size: int) -> None:
    client = await Client.connect(served.port)
    data = np.random.default_rng(size).random(size, np.float32)
    for _ in range(3):
        np.testing.assert_array_equal(await client.infer(data), data)
    await client.close()


async def test_many_clients_at_once_get_their_own_answers(served: Fronted) -> None:
    async def run(number: int) -> None:
        client = await Client.connect(served.port)
        sizes = np.random.default_rng(number).integers(1, 30_000, 30)
        for round_number, size in enumerate(sizes):
            answer = await client.infer(np.full(size, number * 1000 + round_number, np.float32))
            assert answer.size == size
            assert (answer == number * 1000 + round_number).all()
        await client.close()

    await asyncio.gather(*(run(number) for number in range(24)))


async def test_pipelined_requests_are_answered_in_order(served: Fronted) -> None:
    client = await Client.connect(served.port)
    for number in range(15):
        client.send_infer([number])
    assert [(await client.inferred()).tolist() for _ in range(15)] == [[number] for number in range(15)]
    await client.close()


async def test_each_connection_goes_to_the_front_that_has_the_fewest() -> None:
    with fronted(num_fronts=3) as served:
        clients = [await Client.connect(served.port) for _ in range(30)]
        served.until(lambda: connections(served) == 30, "all were dealt")
        assert loads(served) == [10, 10, 10]
        await asyncio.gather(*(client.infer([1]) for client in clients))
        # Every third went to the same front: it has none left now.
        for client in clients[::3]:
            await client.close()
        served.until(lambda: sorted(loads(served)) == [0, 10, 10], "the closed ones were reported")
        emptied = loads(served).index(0)
        clients += [await Client.connect(served.port) for _ in range(10)]
        served.until(lambda: connections(served) == 30, "the new ones were dealt")
        assert loads(served)[emptied] == 10
        for client in clients:
            await client.close()


async def test_counts_of_fronts_are_those_of_the_server() -> None:
    with fronted(limits=WireLimits(max_body_bytes=1000)) as served:
        clients = [await Client.connect(served.port) for _ in range(4)]
        await asyncio.gather(*(client.infer([1]) for client in clients))
        served.until(lambda: served.counts.connections_open[Protocol.HTTP1] == 4, "four are open")
        status, _, _ = await clients[0].ask("POST", "/v2/models/echo/infer", b"x" * 2000)
        assert status == 413
        served.until(
            lambda: served.counts.violations[Protocol.HTTP1, Violation.BODY_TOO_LARGE] == 1, "the violation is counted"
        )
        for client in clients:
            await client.close()
        served.until(lambda: served.counts.connections_open[Protocol.HTTP1] == 0, "none is open")
        assert served.counts.connections_opened[Protocol.HTTP1] == 4


async def test_a_killed_front_costs_its_connections_only() -> None:
    model = EchoModel()
    with fronted(model, num_fronts=2) as served:
        clients = [await Client.connect(served.port) for _ in range(16)]
        is_over = asyncio.Event()

        async def run(client: Client) -> bool:
            """Whether the connection survived."""
            with contextlib.suppress(*LOST):
                while not is_over.is_set():
                    await client.infer(np.ones(5000))
                return True
            return False

        running = [asyncio.ensure_future(run(client)) for client in clients]
        await asyncio.to_thread(served.until, lambda: loads(served) == [8, 8], "all were dealt")
        victim = served.gauges[0].pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        await asyncio.to_thread(served.until, lambda: served.gauges[0].num_restarts == 1, "the front was started again")
        await asyncio.to_thread(served.until, lambda: all(g.is_serving for g in served.gauges), "it serves")
        before = [client.num_answered for client in clients]
        new = [await Client.connect(served.port) for _ in range(8)]
        await asyncio.gather(*(client.infer([1]) for client in new))
        is_over.set()
        survived = await asyncio.gather(*running)
        assert Counter(survived) == {True: 8, False: 8}
        assert all(
            client.num_answered > count
            for client, count, is_alive in zip(clients, before, survived, strict=True)
            if is_alive
        )
        served.until(lambda: loads(served) == [8, 8], "the new connections went to the new front")
        assert sum(gauge.num_inflight for gauge in served.gauges) == 0
        for client in (*clients, *new):
            await client.close()


def pids(served: Fronted) -> list[int | None]:
    return [gauge.pid for gauge in served.gauges]


async def test_what_a_killed_front_had_in_flight_is_cancelled() -> None:
    model = EchoModel(holds=True)
    with fronted(model, num_fronts=1) as served:
        clients = [await Client.connect(served.port) for _ in range(4)]
        for client in clients:
            client.send_infer([1])
        served.until(lambda: len(model.held) == 4, "the requests are in the model")
        assert served.gauges[0].num_inflight == 4
        (victim,) = pids(served)
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        served.until(lambda: len(model.cancelled) == 4, "the requests are cancelled")
        served.until(lambda: served.counts.connections_open[Protocol.HTTP1] == 0, "its connections are not counted")
        for client in clients:
            with pytest.raises(LOST):
                await client.answer()
            await client.close()


def num_mappings() -> int:
    """Of memory that is shared with fronts."""
    return sum("memfd:wire-" in line for line in Path("/proc/self/maps").read_text().splitlines())


async def test_nothing_is_left_of_fronts_that_died() -> None:
    options = FrontOptions(restart=RestartOptions(max_pause_s=0.0))
    with fronted(num_fronts=2, options=options) as served:
        held: list[tuple[int, int]] = []
        for _ in range(4):
            clients = [await Client.connect(served.port) for _ in range(6)]
            await asyncio.gather(*(client.infer(np.ones(100_000)) for client in clients))
            pid = served.gauges[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            for client in clients:
                await client.close()
            await asyncio.to_thread(
                served.until,
                lambda pid=pid: served.gauges[0].pid != pid and all(gauge.is_serving for gauge in served.gauges),
                "the next one serves",
            )
            await asyncio.to_thread(served.until, lambda: connections(served) == 0, "all were closed")
            held.append((psutil.Process().num_fds(), num_mappings()))
        assert held[-1] == held[0]


async def test_while_no_front_is_there_connections_wait_for_the_next() -> None:
    options = FrontOptions(restart=RestartOptions(first_pause_s=0.3))
    with fronted(num_fronts=1, options=options) as served:
        for _ in range(2):  # the second restart makes a pause
            (victim,) = pids(served)
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            served.until(lambda victim=victim: pids(served) != [victim], "the front's end is seen")
            client = await Client.connect(served.port)
            assert (await client.infer([1, 2])).tolist() == [1, 2]
            await client.close()


async def test_a_front_that_hangs_is_replaced() -> None:
    with fronted(num_fronts=1, options=FrontOptions(max_silence_s=0.5)) as served:
        (victim,) = pids(served)
        assert victim is not None
        os.kill(victim, signal.SIGSTOP)
        served.until(lambda: served.gauges[0].num_restarts == 1, "the front was replaced")
        client = await Client.connect(served.port)
        await client.infer([1])
        await client.close()


async def ask_forever(client: Client) -> None:
    while True:
        await client.ask("GET", "/v2")


async def test_a_stop_lets_what_is_in_flight_finish() -> None:
    model = EchoModel(holds=True)
    with fronted(model) as served:
        # The fronts have two connections each: when all that idle are lost, the front of the busy one drains too.
        busy, *idle = [await Client.connect(served.port) for _ in range(4)]
        for client in idle:
            await client.ask("GET", "/v2")
        busy.send_infer([7])
        served.until(lambda: len(model.held) == 1, "the request is in the model")
        stopping = asyncio.run_coroutine_threadsafe(served.processes.stop(10.0), served.loop)
        for client in idle:
            with pytest.raises(LOST):
                await ask_forever(client)
        assert not stopping.done()
        served.call(lambda: model.release(model.held[0]))
        status, headers, _ = await busy.answer()
        assert (status, headers["connection"]) == (200, "close")
        await asyncio.wrap_future(stopping)
        with pytest.raises(ConnectionRefusedError):
            await Client.connect(served.port)
        for client in (busy, *idle):
            await client.close()


async def test_a_stop_tells_what_does_not_finish_in_time() -> None:
    model = EchoModel(holds=True)
    with fronted(model) as served:
        client = await Client.connect(served.port)
        client.send_infer([7])
        served.until(lambda: len(model.held) == 1, "the request is in the model")
        served.call(lambda: served.processes.stop(0.2))
        status, headers, body = await client.answer()
        assert (status, headers["connection"], b"gives this request up" in body) == (503, "close", True)
        await client.close()
        assert len(model.cancelled) == 1


def test_signals_to_all_are_for_the_core() -> None:
    with fronted(num_fronts=1) as served:
        (front,) = pids(served)
        assert front is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(front, number)
        for _ in range(20):
            assert httpx.get(f"http://{served.url}/v2").status_code == 200
        assert pids(served) == [front]


async def test_tls_is_the_fronts_work(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.pair("server")
    with fronted(tls=TlsFiles(str(pair.certificate), str(pair.key))) as served:
        clients = [await Client.connect(served.port, authority.client_context(("http/1.1",))) for _ in range(4)]
        data = np.arange(100_000, dtype=np.float32)
        for answer in await asyncio.gather(*(client.infer(data) for client in clients)):
            np.testing.assert_array_equal(answer, data)
        for client in clients:
            await client.close()
        renewed = authority.pair("renewed", not_after=datetime(2050, 1, 1, tzinfo=UTC))
        renewed.key.replace(pair.key)
        renewed.certificate.replace(pair.certificate)
        # Of reloads' three families the last says when certificates expire.
        ends = served.counts.reloads.families
        served.until(
            lambda: served.call(ends)[-1].samples[0].value == datetime(2050, 1, 1, tzinfo=UTC).timestamp(),
            "the metrics have the new one",
        )


def test_files_that_are_no_certificate_keep_it_from_starting(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("nonsense")
    with (
        no_leaks(),
        pytest.raises(InvalidArgumentError, match=r"--tls-cert.*wrong\.pem"),
        fronted(tls=TlsFiles(str(wrong), str(wrong))),
    ):
        pass


async def test_a_front_that_cannot_be_started_keeps_it_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    processes = WireProcesses(2, [FrontPort(Address(HOST, 0))], CorePlanes(echo_dataplane(), None, None))
    with no_leaks(), pytest.raises(InternalError, match=r"cannot start a process for wire-[01]: .*/nowhere/python"):
        await processes.start()


async def test_a_front_that_cannot_be_started_again_is_tried_later(monkeypatch: pytest.MonkeyPatch) -> None:
    options = FrontOptions(restart=RestartOptions(first_pause_s=0.05))
    with fronted(num_fronts=2, options=options) as served:
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        pid = served.gauges[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        served.until(lambda: served.gauges[0].num_restarts >= 2, "it was tried twice")
        client = await Client.connect(served.port)
        await client.infer([1])  # by the other one
        monkeypatch.undo()
        served.until(lambda: served.gauges[0].is_serving, "it serves")
        await client.close()


async def test_a_taken_port_keeps_it_from_starting() -> None:
    dataplane = echo_dataplane()
    with no_leaks(), socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        free = FrontPort(Address(HOST, 0))
        processes = WireProcesses(
            2, [free, replace(free, address=Address(HOST, port))], CorePlanes(dataplane, None, None)
        )
        with pytest.raises(UnavailableError, match=f"{port}.*--http-port"):
            await processes.start()
        await processes.stop(1.0)


async def test_a_start_that_is_given_up_leaves_nothing() -> None:
    processes = WireProcesses(2, [FrontPort(Address(HOST, 0))], CorePlanes(echo_dataplane(), None, None))
    with no_leaks():
        num_before = len(psutil.Process().children())
        starting = asyncio.ensure_future(processes.start())
        while len(psutil.Process().children()) < num_before + 2:  # noqa: ASYNC110 - the system tells nobody
            await asyncio.sleep(0.001)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting


async def test_silent_connections_are_closed_by_the_limits_of_the_port() -> None:
    limits = WireLimits(times=TimeLimits(head_s=0.1))
    with fronted(limits=limits) as served:
        client = await Client.connect(served.port)
        with pytest.raises(LOST):
            await client.answer()
        served.until(lambda: connections(served) == 0, "it is gone")
        await client.close()


async def test_connections_beyond_the_limit_are_refused() -> None:
    with fronted(limits=WireLimits(max_connections=4)) as served:
        clients = [await Client.connect(served.port) for _ in range(4)]
        await asyncio.gather(*(client.infer([1]) for client in clients))
        refused = await Client.connect(served.port)
        status, _, body = await refused.ask("GET", "/v2")
        assert (status, b"--max-connections" in body) == (503, True)
        for client in (*clients, refused):
            await client.close()
