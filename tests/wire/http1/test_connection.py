"""One connection without a socket: order, ends, limits and patience."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref

import pytest
from support.http1_dialogue import Dialogue, later, limits_of, path_back

from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.response import HttpResponse
from modelserver.telemetry.wire_counts import Protocol, Violation
from modelserver.wire.body import MAX_RECEIVED_BYTES, BodyCollector
from modelserver.wire.limits import KeepaliveLimits

GET = b"GET /%d HTTP/1.1\r\nHost: test\r\n\r\n"
POST = b"POST /%d HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def _turns(count: int = 3) -> asyncio.Future[None]:
    """A few turns of the loop."""
    return asyncio.ensure_future(_sleep(count))


async def _sleep(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# The life of a connection.


async def test_it_is_counted_from_begin_to_its_loss() -> None:
    dialogue = Dialogue().begin(GET % 0)
    counts = dialogue.context.counts
    assert (counts.connections_open[Protocol.HTTP1], counts.connections_opened[Protocol.HTTP1]) == (1, 1)
    assert dialogue.context.connections == {dialogue.connection}
    assert dialogue.take().endswith(b"/0")
    dialogue.lose()
    assert counts.connections_open[Protocol.HTTP1] == 0
    assert not dialogue.context.connections


async def test_a_port_without_http_says_so() -> None:
    dialogue = Dialogue(has_http=False).begin(GET % 0)
    assert dialogue.take().startswith(b"HTTP/1.1 404 ")


async def test_a_request_that_asks_for_the_close_is_the_last() -> None:
    dialogue = Dialogue().begin(b"GET /a HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n" + GET % 1)
    answer = dialogue.take()
    assert b"Connection: close\r\n" in answer
    assert answer.endswith(b"/a")
    assert dialogue.transport.ending == "write_eof"


async def test_the_body_of_the_last_request_may_come_later() -> None:
    head = b"POST /a HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: 3\r\n\r\n"
    dialogue = Dialogue().begin(head + b"a")
    dialogue.send(b"bcd")
    assert dialogue.exchanges[0].body == b"abc"
    assert dialogue.transport.ending == "write_eof"


async def test_http_1_0_is_kept_alive_only_when_it_asks() -> None:
    dialogue = Dialogue().begin(b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert b"Connection: keep-alive\r\n" in dialogue.take()
    dialogue.send(b"GET /b HTTP/1.0\r\n\r\n")
    assert b"Connection: close\r\n" in dialogue.take()
    assert dialogue.transport.ending == "write_eof"


async def test_each_answer_has_its_own_head_whatever_the_last_one_had() -> None:
    one, other = (("A", "1"),), (("A", "2"),)
    changing = [("A", "3")]
    responses = [
        HttpResponse(200, one, (b"x",)),
        HttpResponse(200, one, (b"y",)),
        HttpResponse(200, one, (b"xyz", b"w")),
        HttpResponse(200, other, (b"abcd",)),
        HttpResponse(404, other, (b"abcd",)),
        HttpResponse(200, other),
        HttpResponse(200, changing, (b"1",)),
        HttpResponse(200, changing, (b"2",)),
        HttpResponse(200, one, (b"x",)),
    ]
    left = iter(responses)

    def answer(exchange: HttpExchange) -> None:
        response = next(left)
        exchange.respond(response)
        if response.headers is changing:
            changing.append(("B", "4"))

    dialogue = Dialogue(answer).begin(b"")
    for response in responses:
        headers = list(response.headers)
        dialogue.send(POST % (0, 2) + b"ab")
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        body = b"".join(response.body)
        reason = {200: "OK", 404: "Not Found"}[response.status]
        head = f"HTTP/1.1 {response.status} {reason}\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
        assert dialogue.take() == head.encode() + body
    assert [bytes(exchange.body) for exchange in dialogue.exchanges] == [b"ab"] * len(responses)


async def test_a_repeated_head_is_read_anew_when_more_or_less_than_one_request_comes() -> None:
    request = POST % (0, 2)
    dialogue = Dialogue().begin(b"")
    for pieces in (
        [request + b"ab"] * 2,
        [request + b"a", b"b"],
        [request + b"ab" + request + b"cd"],
        [request + b"ef"],
    ):
        for piece in pieces:
            dialogue.send(piece)
    dialogue.send((POST % (1, 2)) + b"gh")  # as long as the others
    bodies = [bytes(exchange.body) for exchange in dialogue.exchanges]
    assert bodies == [b"ab", b"ab", b"ab", b"ab", b"cd", b"ef", b"gh"]
    assert [exchange.head.path for exchange in dialogue.exchanges] == ["/0"] * 6 + ["/1"]


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_without_body_has_no_length(status: int) -> None:
    dialogue = Dialogue(lambda exchange: exchange.respond(HttpResponse(status))).begin(GET % 0)
    answer = dialogue.take()
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b"Content-Length" not in answer
    assert answer.endswith(b"\r\n\r\n")


async def test_the_answer_to_head_has_a_length_and_no_body() -> None:
    dialogue = Dialogue().begin(b"HEAD /abc HTTP/1.1\r\nHost: test\r\n\r\n")
    assert dialogue.take() == b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n"


# Order and pipelining.


async def test_answers_of_one_read_leave_in_one_write() -> None:
    dialogue = Dialogue().begin()
    dialogue.send(b"".join(GET % number for number in range(20)))
    assert len(dialogue.transport.writes) == 1
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
    assert dialogue.take() == b"".join(head % len(b"/%d" % number) + b"/%d" % number for number in range(20))


async def test_answers_given_elsewhere_leave_at_the_end_of_the_turn() -> None:
    dialogue = Dialogue(later).begin(GET % 0)
    dialogue.exchanges[0].respond(HttpResponse(200, [], (b"done",)))
    assert not dialogue.transport.writes
    await _turns()
    assert dialogue.take().endswith(b"done")


async def test_an_answer_given_at_once_stays_behind_one_given_elsewhere_before() -> None:
    dialogue = Dialogue().begin(GET % 0)
    dialogue.take()
    for size in (1, 100_000):
        dialogue.frontend.answer = later
        dialogue.send(GET % 0)
        dialogue.exchanges[-1].respond(HttpResponse(200, [], (b"first",)))
        assert not dialogue.transport.writes
        body = b"x" * size
        dialogue.frontend.answer = lambda exchange, body=body: exchange.respond(HttpResponse(200, [], (body,)))
        dialogue.send(GET % 0)
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
        assert dialogue.take() == head % 5 + b"first" + head % size + body
        await _turns()
        assert not dialogue.take()


async def test_answers_keep_the_order_of_the_requests() -> None:
    dialogue = Dialogue(later).begin()
    dialogue.send(b"".join(GET % number for number in range(50)))
    for number in range(50):
        assert len(dialogue.exchanges) == number + 1  # the next one waits for this one's answer
        path_back(dialogue.exchanges[number])
    await _turns()
    answer = dialogue.take()
    assert answer.count(b"HTTP/1.1 200") == 50
    assert answer.endswith(b"/49")


async def test_only_so_many_requests_wait() -> None:
    dialogue = Dialogue(later, limits_of(max_pipelined=4)).begin()
    dialogue.send(b"".join(GET % number for number in range(50)))
    assert dialogue.transport.is_paused
    assert len(dialogue.connection._waiting) == 4
    for number in range(50):
        path_back(dialogue.exchanges[number])
    assert not dialogue.transport.is_paused
    await _turns()
    assert dialogue.take().count(b"HTTP/1.1 200") == 50


async def test_only_so_many_bytes_of_requests_wait() -> None:
    dialogue = Dialogue(later).begin()
    for number in range(3):  # one is in its turn, two are over the limit
        dialogue.send(POST % (number, 600_000))
        dialogue.send(bytes(600_000))
    assert not dialogue.transport.is_paused
    dialogue.send(POST % (3, 600_000))
    assert dialogue.transport.is_paused
    for number in range(3):
        path_back(dialogue.exchanges[number])
    assert not dialogue.transport.is_paused
    dialogue.send(bytes(600_000))
    assert len(dialogue.exchanges) == 4


async def test_many_requests_of_one_read_leave_others_their_turn() -> None:
    dialogue = Dialogue().begin()
    dialogue.send(b"".join(GET % number for number in range(1000)))
    assert len(dialogue.exchanges) == 128
    assert dialogue.transport.is_paused
    await _turns(20)
    assert len(dialogue.exchanges) == 1000
    assert not dialogue.transport.is_paused


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("comes_apart", [False, True])
async def test_many_chunks_of_one_read_leave_others_their_turn(is_last: bool, comes_apart: bool) -> None:
    """The rest of the body is read in turns, then what is behind it; nothing is received meanwhile."""
    head = b"POST /c HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n"
    head += b"Connection: close\r\n\r\n" if is_last else b"\r\n"
    dialogue = Dialogue().begin()
    if comes_apart:
        dialogue.send(head)
    dialogue.send((b"" if comes_apart else head) + b"1\r\nx\r\n" * 5000 + b"0\r\n\r\n" + GET % 1)
    assert not dialogue.exchanges
    assert dialogue.transport.is_paused
    await asyncio.sleep(0)
    assert not dialogue.exchanges
    await _turns(10)
    assert bytes(dialogue.exchanges[0].body) == b"x" * 5000
    assert len(dialogue.exchanges) == (1 if is_last else 2)
    assert not dialogue.transport.is_paused
    assert dialogue.transport.ending == ("write_eof" if is_last else "")


async def test_a_fault_among_many_chunks_is_answered_behind_the_answers_that_are_due() -> None:
    dialogue = Dialogue(later).begin()
    head = b"POST /c HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
    dialogue.send(GET % 0 + head + b"1\r\nx\r\n" * 2500 + b"nonsense\r\n")
    assert dialogue.transport.is_paused
    await _turns(5)
    assert not dialogue.take()
    path_back(dialogue.exchanges[0])
    await _turns(5)
    answer = dialogue.take()
    assert answer.index(b"\r\n/0") < answer.index(b"HTTP/1.1 400 ")
    assert len(dialogue.exchanges) == 1


async def test_what_is_no_request_is_refused_behind_the_answers_that_are_due() -> None:
    dialogue = Dialogue(later).begin(GET % 0 + GET % 1 + b"nonsense\r\n\r\n" + GET % 2)
    assert not dialogue.take()
    path_back(dialogue.exchanges[0])
    path_back(dialogue.exchanges[1])
    answer = dialogue.take()
    assert answer.find(b"\r\n/0") < answer.find(b"\r\n/1") < answer.find(b"HTTP/1.1 400 ")
    assert answer.count(b"Connection: close") == 1
    assert len(dialogue.exchanges) == 2


async def test_cut_anywhere_the_answers_are_the_same() -> None:
    chunked = b"POST /c HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    data = b"\r\n" + GET % 0 + POST % (1, 5) + b"12345" + chunked + GET % 2 + b"get"

    def body_back(exchange: HttpExchange) -> None:
        exchange.respond(HttpResponse(200, [], (exchange.head.path.encode(), bytes(exchange.body))))

    whole = Dialogue(body_back).begin(data).take()
    assert whole.count(b"HTTP/1.1 200") == 4
    for cut in range(len(data) + 1):
        dialogue = Dialogue(body_back).begin(data[:cut])
        if not dialogue.transport.is_closing():
            dialogue.send(data[cut:])
        assert dialogue.take() == whole
        dialogue.lose()


# Bodies.


@pytest.mark.parametrize("size", [1, 32 * 1024 - 1, 32 * 1024, 320 * 1024, 1_000_000])
@pytest.mark.parametrize("with_head", [True, False])
async def test_bodies_of_all_sizes(size: int, with_head: bool) -> None:
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)
    dialogue = Dialogue().begin()
    pieces = [POST % (0, size) + body] if with_head else [POST % (0, size), body]
    for piece in pieces:
        dialogue.send(piece)
    dialogue.send(GET % 1)
    assert bytes(dialogue.exchanges[0].body) == body
    assert dialogue.take().endswith(b"/1")


async def test_a_large_body_is_received_into_its_own_memory() -> None:
    dialogue = Dialogue().begin(POST % (0, 1_000_000))
    num_left = 1_000_000
    while num_left:
        own = dialogue.connection.get_buffer(-1)
        assert len(own) == min(num_left, MAX_RECEIVED_BYTES)
        own[:] = bytes(len(own))
        dialogue.connection.buffer_updated(len(own))
        num_left -= len(own)
    body = dialogue.exchanges[0].body
    assert isinstance(body, memoryview)
    assert body.obj is own.obj
    assert dialogue.connection.get_buffer(-1) is dialogue.context.arena.view


async def test_a_body_over_the_limit_is_refused_unread() -> None:
    dialogue = Dialogue(limits=limits_of(max_body_bytes=10)).begin(POST % (0, 11))
    answer = dialogue.take()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"--http-max-input-size" in answer
    assert dialogue.violations == [Violation.BODY_TOO_LARGE]
    dialogue.send(bytes(11) + GET % 1)
    assert not dialogue.exchanges


async def test_what_a_refused_client_still_sends_has_a_limit() -> None:
    dialogue = Dialogue().begin(b"nonsense\r\n\r\n")
    num_sent = 0
    while not dialogue.transport.is_paused:
        dialogue.send(bytes(1024))
        num_sent += 1024
    assert 64 * 1024 < num_sent <= 66 * 1024


async def test_large_requests_have_a_common_budget() -> None:
    dialogue = Dialogue(limits=limits_of(max_assembly_bytes=1 << 20)).begin()
    # A faster one is exempt from it already.
    dialogue.context.assembly.charge(1 << 40, BodyCollector(None, 0, 1 << 40))
    dialogue.send(POST % (0, 4 << 20) + bytes(3 << 20))
    assert dialogue.take().startswith(b"HTTP/1.1 503 ")
    assert dialogue.violations == [Violation.ASSEMBLY_BUDGET]
    assert dialogue.context.assembly.num_bytes == 0


@pytest.mark.parametrize("lines", [b"Content-Length: 3000000\r\n", b"Transfer-Encoding: chunked\r\n"])
async def test_a_lost_client_gives_its_budget_back(lines: bytes) -> None:
    dialogue = Dialogue().begin(b"POST / HTTP/1.1\r\nHost: test\r\n" + lines + b"\r\n")
    dialogue.send(b"200000\r\n" + bytes(1_500_000))
    assert dialogue.context.assembly.num_bytes > 0
    dialogue.lose()
    assert dialogue.context.assembly.num_bytes == 0


# Expectations.


async def test_a_client_that_asks_first_is_invited() -> None:
    dialogue = Dialogue().begin(b"POST /a HTTP/1.1\r\nHost: test\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
    assert dialogue.take() == CONTINUE
    dialogue.send(b"abc")
    assert dialogue.take().endswith(b"/a")


async def test_an_invitation_waits_for_the_answers_before_it() -> None:
    ask = b"POST /a HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
    dialogue = Dialogue(later).begin(GET % 0 + ask)
    assert dialogue.take() == b""
    path_back(dialogue.exchanges[0])
    assert dialogue.take().endswith(b"/0" + CONTINUE)


@pytest.mark.parametrize("rest", [b"a", b"abc"])
async def test_who_does_not_wait_for_the_invitation_gets_none(rest: bytes) -> None:
    ask = b"POST /a HTTP/1.1\r\nHost: test\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"
    dialogue = Dialogue().begin(ask + rest)
    dialogue.send(b"abc"[len(rest) :])
    assert dialogue.take().startswith(b"HTTP/1.1 200 ")


async def test_a_client_that_asks_to_send_too_much_is_refused() -> None:
    ask = b"POST /a HTTP/1.1\r\nHost: test\r\nContent-Length: 11\r\nExpect: 100-continue\r\n\r\n"
    dialogue = Dialogue(limits=limits_of(max_body_bytes=10)).begin(ask)
    assert dialogue.take().startswith(b"HTTP/1.1 413 ")


# Patience.


@pytest.mark.parametrize("beginning", [b"", b"G", b"GET / HTTP/1.1\r\nHost: test\r\n"])
@pytest.mark.parametrize("before", [b"", GET % 0])
async def test_a_head_has_its_time_whatever_trickles(beginning: bytes, before: bytes) -> None:
    dialogue = Dialogue(limits=limits_of(times={"head_s": 10, "http1_idle_s": 1000})).begin(before)
    dialogue.take()
    if before and not beginning:
        return  # it is idle
    dialogue.send(beginning)
    for _ in range(9):
        dialogue.wait(1)
        dialogue.send(b"X" if beginning else b"")
    assert not dialogue.transport.is_closing()
    dialogue.wait(2)
    assert dialogue.violations == [Violation.SLOW_HEAD]
    assert dialogue.take()[:12] == (b"HTTP/1.1 408" if beginning else b"")
    assert dialogue.transport.ending == ("write_eof" if beginning else "close")


@pytest.mark.parametrize(
    "lines", [b"Content-Length: 9\r\n", b"Content-Length: 90000\r\n", b"Transfer-Encoding: chunked\r\n"]
)
async def test_a_body_must_not_pause(lines: bytes) -> None:
    dialogue = Dialogue(limits=limits_of(times={"body_pause_s": 5})).begin()
    dialogue.send(b"POST / HTTP/1.1\r\nHost: test\r\n" + lines + b"\r\n")
    for _ in range(3):
        dialogue.wait(5)
        dialogue.send(b"1")
    assert not dialogue.transport.writes
    dialogue.wait(7)
    assert dialogue.take().startswith(b"HTTP/1.1 408 ")
    assert dialogue.violations == [Violation.SLOW_BODY]


async def test_a_body_must_not_trickle() -> None:
    dialogue = Dialogue(limits=limits_of(times={"body_rate": 100})).begin(POST % (0, 1_000_000))
    for _ in range(61):
        dialogue.wait(1)
        dialogue.send(bytes(101))
    assert not dialogue.transport.writes
    for _ in range(61):
        dialogue.wait(1)
        if not dialogue.transport.writes:
            dialogue.send(bytes(99))
    assert dialogue.take().startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("before", [b"", b"\r\n"])
async def test_an_idle_connection_is_closed_without_a_word(before: bytes) -> None:
    dialogue = Dialogue().begin(GET % 0 + before)
    dialogue.take()
    dialogue.wait(74)
    dialogue.send(GET % 1)
    assert dialogue.take().endswith(b"/1")
    dialogue.wait(74)
    assert not dialogue.transport.is_closing()
    dialogue.wait(4)
    assert dialogue.take() == b""
    assert dialogue.transport.ending == "close"
    assert dialogue.violations == []


async def test_an_answer_may_take_longer_than_any_patience() -> None:
    dialogue = Dialogue(later).begin(GET % 0 + POST % (1, 10))
    dialogue.wait(1000, 10)
    path_back(dialogue.exchanges[0])
    await _turns()
    assert dialogue.take().endswith(b"/0")
    dialogue.wait(25)
    dialogue.send(bytes(10))
    assert len(dialogue.exchanges) == 2


async def test_an_idle_connection_remembers_no_heads() -> None:
    dialogue = Dialogue().begin(GET % 0)
    assert dialogue.connection._memo._heads.known
    dialogue.wait(3)
    assert not dialogue.connection._memo._heads.known
    assert dialogue.connection._last_data == b""
    dialogue.send(GET % 0)
    assert len(dialogue.exchanges) == 2


async def test_a_reader_that_takes_nothing_is_cut() -> None:
    dialogue = Dialogue(limits=limits_of(times={"http1_idle_s": 1000})).begin()
    dialogue.transport.peer_reads = False
    dialogue.send(GET % 0)
    dialogue.wait(50)
    dialogue.transport.num_waiting -= 1
    dialogue.wait(60)
    assert dialogue.transport.ending == ""
    dialogue.wait(5)
    assert dialogue.transport.ending == "abort"
    assert dialogue.violations == [Violation.SLOW_READER]


async def test_who_does_not_read_is_read_no_further() -> None:
    dialogue = Dialogue().begin()
    dialogue.connection.pause_writing()
    assert dialogue.transport.is_paused
    dialogue.connection.resume_writing()
    assert not dialogue.transport.is_paused
    dialogue.send(GET % 0)
    assert dialogue.take().endswith(b"/0")


async def test_requests_wait_for_a_peer_that_reads() -> None:
    dialogue = Dialogue(later).begin(GET % 0 + GET % 1)
    path_answered = dialogue.exchanges[0]
    dialogue.connection.pause_writing()
    path_back(path_answered)
    assert len(dialogue.exchanges) == 1
    dialogue.connection.resume_writing()
    assert len(dialogue.exchanges) == 2


async def test_an_old_connection_is_closed_behind_its_answers() -> None:
    limits = limits_of(keepalive=KeepaliveLimits(max_age_s=10, max_age_grace_s=5))
    dialogue = Dialogue(later, limits).begin(GET % 0)
    dialogue.wait(12)
    assert dialogue.transport.ending == ""
    path_back(dialogue.exchanges[0])
    assert b"Connection: close" in dialogue.take()
    idle = Dialogue(path_back, limits).begin(GET % 0)
    idle.wait(12)
    assert idle.transport.ending == "", "a request may be on its way"
    idle.send(GET % 1)
    assert b"Connection: close" in idle.take()
    assert idle.transport.ending == "write_eof"
    stuck = Dialogue(later, limits).begin(GET % 0)
    stuck.wait(17)
    assert stuck.transport.ending == "abort"


async def test_a_refused_client_has_a_moment_to_read_why() -> None:
    dialogue = Dialogue().begin(b"nonsense\r\n\r\n")
    assert dialogue.transport.ending == "write_eof"
    for _ in range(20):
        dialogue.wait(1)
        dialogue.send(b"still sending")
    assert dialogue.transport.ending == "write_eof"
    dialogue.wait(3)
    assert dialogue.transport.ending == "abort"


# Draining.


@pytest.mark.parametrize("before", [b"", GET % 0, GET % 0 + b"\r\n"])
async def test_an_idle_connection_gets_some_time_at_the_drain(before: bytes) -> None:
    """Closed at once, a request that is on its way would be lost."""
    silent, late = Dialogue().begin(before), Dialogue().begin(before)
    for dialogue in (silent, late):
        dialogue.take()
        dialogue.connection.shutdown()
    late.send(GET % 7)
    answer = late.take()
    assert answer.endswith(b"/7")
    assert b"Connection: close" in answer
    async with asyncio.timeout(60):
        while silent.transport.ending != "close":  # noqa: ASYNC110 - the connection's timer does it
            await asyncio.sleep(0.01)


async def test_what_came_before_the_drain_is_answered() -> None:
    dialogue = Dialogue(later, limits_of(max_pipelined=2)).begin(b"".join(GET % number for number in range(5)))
    dialogue.connection.shutdown()
    dialogue.connection.shutdown()
    for number in range(5):
        assert b"Connection: close" not in dialogue.take()
        path_back(dialogue.exchanges[number])
    answer = dialogue.take()
    assert answer.endswith(b"/4")
    assert answer.count(b"Connection: close") == 1
    assert dialogue.transport.ending == "write_eof"


async def test_requests_of_one_read_at_the_drain_are_answered() -> None:
    dialogue = Dialogue()
    dialogue.context.is_draining = True
    dialogue.begin(b"".join(GET % number for number in range(5)))
    answer = dialogue.take()
    assert answer.count(b"HTTP/1.1 200") == 5
    assert answer.rindex(b"Connection: close") > answer.rindex(b"HTTP/1.1 200")


async def test_a_request_that_began_before_the_drain_may_end() -> None:
    dialogue = Dialogue().begin((POST % (0, 3))[:-5])
    dialogue.connection.shutdown()
    dialogue.send((POST % (0, 3))[-5:] + b"ab")
    dialogue.send(b"c")
    assert b"Connection: close" in dialogue.take()


# Clients that leave.


async def test_a_client_that_leaves_is_told_to_the_handler_once() -> None:
    left: list[str] = []
    dialogue = Dialogue(later).begin(GET % 0 + GET % 1)
    dialogue.exchanges[0].on_disconnect = lambda: left.append("left")
    dialogue.lose()
    assert left == ["left"]
    path_back(dialogue.exchanges[0])
    assert len(dialogue.exchanges) == 1


async def test_what_is_collected_is_sent_before_the_end_of_a_client_that_has_finished() -> None:
    dialogue = Dialogue(later).begin(GET % 0)
    path_back(dialogue.exchanges[0])
    assert not dialogue.connection.eof_received()
    assert dialogue.take().endswith(b"/0")


async def test_an_answer_is_given_once() -> None:
    dialogue = Dialogue(later).begin(GET % 0)
    for _ in range(3):
        path_back(dialogue.exchanges[0])
    await _turns()
    assert dialogue.take().count(b"HTTP/1.1") == 1


class _Tracked(bytearray):
    """A buffer whose end can be seen."""


async def test_memory_of_a_request_goes_without_the_collector() -> None:
    ended: list[str] = []

    def answer(exchange: HttpExchange) -> None:
        exchange.on_disconnect = lambda: ended.append(exchange.head.path)  # refers to the exchange
        body = _Tracked(b"x" * 100_000)
        weakref.finalize(body, ended.append, "answered")
        exchange.respond(HttpResponse(200, [], (body,)))

    gc.collect()
    gc.disable()
    try:
        dialogue = Dialogue(answer).begin()
        dialogue.send(POST % (0, 100_000) + bytes(100_000))
        received = weakref.ref(dialogue.exchanges[0].body.obj)
        dialogue.exchanges.clear()
        assert received() is None
        assert ended == ["answered"]
    finally:
        gc.enable()


async def test_errors_are_json() -> None:
    head, _, body = Dialogue().begin(b"nonsense\r\n\r\n").take().partition(b"\r\n\r\n")
    assert b"Content-Type: application/json" in head
    assert "capital letters" in json.loads(body)["error"]


FOREIGN = [b"INVALID CONNECTION PREFACE", b"EHLO mail.example.org", b"PING", b"SSH-2.0-OpenSSH_9.2", b"A B C D"]


@pytest.mark.parametrize("line", FOREIGN)
async def test_another_protocol_is_not_answered(line: bytes) -> None:
    for pieces in ([line + b"\r\n\r\n"], [bytes((byte,)) for byte in line + b"\r\n\r\n"]):
        dialogue = Dialogue().begin()
        for piece in pieces:
            dialogue.send(piece)
        await asyncio.sleep(0)
        assert dialogue.take() == b""
        assert dialogue.transport.ending == "close"
        assert dialogue.violations == [Violation.PROTOCOL]
        assert dialogue.exchanges == []


@pytest.mark.parametrize("line", [b"GET / HTTP/x", b"GET /", b"GET / HTTP/1.1 ", b"X HTTP/1.1", b"OPTIONS *"])
async def test_what_is_nearly_a_request_is_told_what_is_wrong(line: bytes) -> None:
    dialogue = Dialogue().begin()
    dialogue.send(line + b"\r\n\r\n")
    await asyncio.sleep(0)
    assert dialogue.take().startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("line", FOREIGN)
async def test_nonsense_behind_a_request_is_answered(line: bytes) -> None:
    dialogue = Dialogue().begin()
    dialogue.send(b"GET /a HTTP/1.1\r\nHost: test\r\n\r\n" + line + b"\r\n\r\n")
    await asyncio.sleep(0)
    answer = dialogue.take()
    assert answer.find(b"\r\n/a") < answer.find(b"HTTP/1.1 400 ")
