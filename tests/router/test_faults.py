"""Replicas that fail, and what clients of the router learn of it."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from support.layouts import ADDRESS, free_port
from support.routing import (
    OK,
    SSE_HEAD,
    RunningRouter,
    ScriptedReplica,
    chunk,
    read_request,
    replicas,
    reset,
    running_router,
)
from support.waiting import until_true

from modelserver.endpoints.endpoint import EndpointState


def answer_ok(_replica: ScriptedReplica, _connection: socket.socket, _request: bytes) -> bytes:
    return OK


def end_unanswered(_replica: ScriptedReplica, connection: socket.socket, _request: bytes) -> None:
    connection.shutdown(socket.SHUT_RDWR)


def end_by_reset(_replica: ScriptedReplica, connection: socket.socket, _request: bytes) -> None:
    reset(connection)


def refuse_for_now(_replica: ScriptedReplica, _connection: socket.socket, _request: bytes) -> bytes:
    return b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy"


def states(router: RunningRouter) -> list[EndpointState]:
    return router.call(lambda: [each.state for each in router.router.endpoints.endpoints])


def test_without_replicas_each_family_is_told_why(tmp_path: Path) -> None:
    place = tmp_path / "replicas.json"
    place.write_text('{"endpoints": []}')
    with running_router(discover=f"file:{place}") as router, httpx.Client(base_url=f"http://{router.http_url}") as http:
        assert http.get("/v2/health/live").status_code == 200
        ready = http.get("/v2/health/ready")
        assert (ready.status_code, ready.json()) == (503, {"error": "no replica is ready: none is known"})
        plain = http.post("/v2/models/m/infer", json={})
        assert plain.status_code == 503
        assert plain.json() == {"error": "no endpoint is known"}
        assert http.post("/v1/chat/completions", json={}).json()["error"]["message"] == "no endpoint is known"
        assert http.post("/v1/messages", json={}).json()["type"] == "error"
        assert http.post("/api/chat", json={}).json() == {"error": "no endpoint is known"}


def test_a_replica_that_refuses_connections_costs_no_request() -> None:
    nowhere = f"{ADDRESS}:{free_port()}"
    with replicas(answer_ok) as (replica,), running_router((nowhere, replica.url)) as router:
        answers = [httpx.post(f"http://{router.http_url}/v2/models/m/infer", content=b"{}") for _ in range(20)]
        assert {each.status_code for each in answers} == {200}
        assert len(replica.requests) == 20
        assert router.router.replicas.counts.num_lost == 0


def test_a_request_that_may_have_been_processed_is_not_sent_again() -> None:
    with replicas(end_unanswered, answer_ok) as both, running_router([each.url for each in both]) as router:
        with httpx.Client(base_url=f"http://{router.http_url}") as http:
            answers = [http.post("/v2/models/m/infer", content=b"{}") for _ in range(30)]
        lost = [each for each in answers if each.status_code != 200]
        assert lost, "the bad replica got none"
        assert {each.status_code for each in lost} == {502}
        assert "may have been processed" in lost[0].json()["error"]
        counts = router.router.replicas.counts
        assert counts.num_lost == len(lost) == len(both[0].requests)
        assert len(both[1].requests) == 30 - len(lost)


def test_a_request_that_only_reads_is_sent_again() -> None:
    with replicas(end_unanswered, answer_ok) as both, running_router([each.url for each in both]) as router:
        with httpx.Client(base_url=f"http://{router.http_url}") as http:
            assert {http.get("/v2/models/m").status_code for _ in range(10)} == {200}
        assert both[0].requests
        assert router.router.replicas.counts.num_lost == 0


def test_a_request_that_was_not_read_is_sent_again() -> None:
    with replicas(end_by_reset, answer_ok) as both, running_router([each.url for each in both]) as router:
        with httpx.Client(base_url=f"http://{router.http_url}") as http:
            answers = {http.post("/v2/models/m/infer", content=b"{}").status_code for _ in range(10)}
        assert answers == {200}
        assert router.router.replicas.counts.num_retries == len(both[0].requests) > 0


def test_a_replica_that_says_503_passes_the_request_on() -> None:
    with replicas(refuse_for_now, answer_ok) as both, running_router([each.url for each in both]) as router:
        with httpx.Client(base_url=f"http://{router.http_url}") as http:
            assert {http.post("/v2/models/m/infer", content=b"{}").status_code for _ in range(10)} == {200}
        assert both[0].requests


def test_the_only_replica_s_503_is_the_answer() -> None:
    with replicas(refuse_for_now) as (replica,), running_router([replica.url]) as router:
        answer = httpx.post(f"http://{router.http_url}/v2/models/m/infer", content=b"{}")
        assert (answer.status_code, answer.text) == (503, "busy")


def stream_and_die(_replica: ScriptedReplica, connection: socket.socket, _request: bytes) -> None:
    connection.sendall(SSE_HEAD + chunk(b"data: {}\n\n"))
    connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("path", "begins"),
    [
        ("/v1/chat/completions", "data: "),
        ("/v1/messages", "event: error\ndata: "),
        ("/v2/models/m/generate_stream", "data: "),
    ],
)
def test_a_stream_that_breaks_ends_with_an_error_event(path: str, begins: str) -> None:
    with replicas(stream_and_die) as (replica,), running_router([replica.url]) as router:
        answer = httpx.post(f"http://{router.http_url}{path}", content=b"{}")
        first, last, end = answer.text.split("\n\n")
        assert (first, end) == ("data: {}", "")
        assert last.startswith(begins)
        assert "the replica was lost" in json.dumps(json.loads(last[len(begins) :])["error"])
        assert router.router.replicas.counts.num_broken_streams == 1


def test_a_stream_that_breaks_within_an_event_is_cut() -> None:
    def die_within(_replica: ScriptedReplica, connection: socket.socket, _request: bytes) -> None:
        connection.sendall(SSE_HEAD + chunk(b"data: {"))
        connection.shutdown(socket.SHUT_RDWR)

    with (
        replicas(die_within) as (replica,),
        running_router([replica.url]) as router,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        httpx.post(f"http://{router.http_url}/v1/chat/completions", content=b"{}")


def test_an_answer_of_known_length_that_breaks_is_cut() -> None:
    def die_within(_replica: ScriptedReplica, connection: socket.socket, _request: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\nbeginning")
        connection.shutdown(socket.SHUT_RDWR)

    with (
        replicas(die_within) as (replica,),
        running_router([replica.url]) as router,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        httpx.get(f"http://{router.http_url}/v2/models/m")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-6\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 5000 + OK,
        # The beginning of an answer for which there is no request yet.
        OK + b"HTTP/1.1 201 Created\r\nset-cookie: another's\r\nx: ",
    ],
)
def test_a_malformed_answer_harms_its_own_request_only(answer: bytes) -> None:
    answers = iter([answer])

    def respond(_replica: ScriptedReplica, connection: socket.socket, _request: bytes) -> bytes | None:
        malformed = next(answers, None)
        if malformed is None or not malformed.startswith(OK):
            return malformed or OK
        connection.sendall(OK)
        time.sleep(0.02)
        return malformed[len(OK) :]

    with replicas(respond) as (replica,), running_router([replica.url]) as router:
        url = f"http://{router.http_url}/v2/models/m/infer"
        with httpx.Client() as http, suppress(httpx.RemoteProtocolError):
            http.post(url, content=b"{}", timeout=5)
        time.sleep(0.1)
        later = httpx.post(url, content=b"{}", timeout=5)
        assert (later.status_code, later.headers.get("set-cookie")) == (200, None)


def test_a_client_that_leaves_ends_the_request_at_the_replica() -> None:
    has_ended = threading.Event()

    def wait_for_end(_replica: ScriptedReplica, connection: socket.socket, _request: bytes) -> None:
        connection.sendall(SSE_HEAD + chunk(b"data: {}\n\n"))
        if not connection.recv(1):
            has_ended.set()

    with replicas(wait_for_end) as (replica,), running_router([replica.url]) as router:
        with httpx.stream("POST", f"http://{router.http_url}/v1/chat/completions", content=b"{}") as answer:
            assert next(answer.iter_text()) == "data: {}\n\n"
        assert has_ended.wait(30)
        until_true(lambda: router.router.replicas.counts.num_active == 0, "the request is forgotten")
        assert router.router.endpoints.outstanding == 0


def test_requests_leave_a_replica_that_answers_nothing() -> None:
    """Half-open: its system accepts, and nothing ever answers."""
    silent = socket.create_server((ADDRESS, 0), backlog=64)
    url = f"{ADDRESS}:{silent.getsockname()[1]}"
    with silent, replicas(answer_ok) as (replica,), running_router((url, replica.url)) as router:
        until_true(lambda: EndpointState.DOWN in states(router), "the silent replica is found")
        with httpx.Client(base_url=f"http://{router.http_url}") as http:
            assert {http.post("/v2/models/m/infer", content=b"{}").status_code for _ in range(10)} == {200}


def test_a_probe_reads_no_endless_answer() -> None:
    sent: list[int] = []

    class Endless(ScriptedReplica):
        def _serve(self, connection: socket.socket) -> None:
            with connection:
                while read_request(connection) is not None:
                    num_bytes = 0
                    with suppress(OSError):
                        connection.sendall(SSE_HEAD)
                        while num_bytes < 64 << 20:
                            num_bytes += connection.send(chunk(bytes(65_536)))
                    sent.append(num_bytes)

    replica = Endless(answer_ok)
    try:
        with running_router([replica.url]) as router:
            until_true(lambda: bool(sent), "the probe has ended")
            assert sent[0] < 32 << 20
            assert states(router) == [EndpointState.READY], "its status is enough"
    finally:
        replica.close()


def test_a_replica_that_is_not_ready_gets_no_requests(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "modelserver.router")
    with replicas(answer_ok, answer_ok) as both, running_router([each.url for each in both]) as router:
        until_true(lambda: states(router) == [EndpointState.READY] * 2, "both are ready")
        both[0].is_ready = False
        until_true(lambda: states(router).count(EndpointState.READY) == 1, "the probe finds it")
        with httpx.Client(base_url=f"http://{router.http_url}") as http:
            assert {http.post("/v2/models/m/infer", content=b"{}").status_code for _ in range(5)} == {200}
        assert not both[0].requests
        told = [record.getMessage().partition("://")[2] for record in caplog.records]
        assert f"{both[0].url.rpartition('://')[2]} is ready" in told
        assert any(text.startswith(both[0].url.rpartition("://")[2]) and "ready" not in text for text in told)


def test_requests_wait_for_the_first_replica(tmp_path: Path) -> None:
    place = tmp_path / "replicas.json"
    place.write_text('{"endpoints": []}')
    answers: list[int] = []
    with (
        replicas(answer_ok) as (replica,),
        running_router(discover=f"file:{place}", own={"wait_for_replica_secs": 60.0, "max_waiting": 1}) as router,
    ):

        def ask() -> None:
            answers.append(
                httpx.post(f"http://{router.http_url}/v2/models/m/infer", content=b"{}", timeout=60).status_code
            )

        thread = threading.Thread(target=ask)
        thread.start()
        until_true(lambda: router.router.replicas.num_waiting == 1, "it waits")
        page = httpx.get(f"http://{router.metrics_url}/metrics").text
        assert "modelserver_router_pending_requests 1" in page
        assert "modelserver_router_waiting_requests 1" in page
        assert httpx.post(f"http://{router.http_url}/v2/models/m/infer", content=b"{}").status_code == 503
        host, port = replica.url.split(":")
        place.write_text(json.dumps({"endpoints": [{"address": host, "port": port}]}))
        thread.join(60)
        assert answers == [200]


def test_routers_in_a_circle_are_found_out() -> None:
    with replicas(answer_ok) as (replica,), running_router([replica.url]) as router:
        url = f"http://{router.http_url}/v2/models/m/infer"
        assert httpx.post(url, content=b"{}", headers={"x-modelserver-router-hops": "3"}).status_code == 200
        assert b"x-modelserver-router-hops: 4" in replica.requests[0]
        refused = httpx.post(url, content=b"{}", headers={"x-modelserver-router-hops": "4"})
        assert refused.status_code == 508
        assert refused.json()["error"].startswith("the request has passed 4 routers")


def test_a_thousand_members_come_and_go(tmp_path: Path) -> None:
    place = tmp_path / "replicas.json"
    with replicas(answer_ok) as (replica,):
        host, port = replica.url.split(":")
        one = [{"address": host, "port": port}]
        others = [
            {"address": f"http://127.1.{number // 250}.{number % 250 + 1}:9", "state": "starting"}
            for number in range(999)
        ]
        place.write_text(json.dumps({"endpoints": one + others}))
        with running_router(discover=f"file:{place}") as router:
            assert len(router.router.endpoints) == 1000
            url = f"http://{router.http_url}/v2/models/m/infer"
            assert httpx.post(url, content=b"{}").status_code == 200
            listed = httpx.get(f"http://{router.http_url}/v2/router/endpoints").json()["endpoints"]
            assert [each["state"] for each in listed].count("starting") == 999
            place.write_text(json.dumps({"endpoints": one}))
            until_true(lambda: len(router.router.endpoints) == 1, "they go")
            assert httpx.post(url, content=b"{}").status_code == 200
