"""The child's end of the conversation: who receives, and whom it reaches."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from modelserver.execution.process.channel import Channel, PeerGoneError
from modelserver.execution.process.messages import AskReady, Cancelled, Message, Released, Reply, Room, Told, Trim
from modelserver.execution.process.server_connection import ServerConnection
from modelserver.execution.process.shared_buffer import SharedBuffer


@pytest.fixture
def pair() -> Iterator[tuple[Channel, ServerConnection]]:
    """The server's channel, and the child's connection."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    forth, back = SharedBuffer.create("forth"), SharedBuffer.create("back")
    server = Channel(ours, forth, back)
    child = Channel(theirs, SharedBuffer(os.dup(back.fd)), SharedBuffer(os.dup(forth.fd)))
    yield server, ServerConnection(child)
    for channel in (server, child):
        channel.close()


class Waiter:
    """Collects the replies of one call."""

    def __init__(self) -> None:
        self.replies: list[Message] = []

    def take(self, message: Reply | Told, _payload: Any) -> None:
        self.replies.append(message)

    def first(self) -> Message | None:
        return self.replies[0] if self.replies else None


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    return thread, results


def test_whoever_waits_receives_for_the_others(pair: tuple[Channel, ServerConnection]) -> None:
    server, connection = pair
    waiters = [Waiter() for _ in range(3)]
    numbers = [connection.expect(waiter) for waiter in waiters]
    threads = [in_thread(lambda waiter=waiter: connection.wait(waiter.first)) for waiter in waiters]  # type: ignore[misc]
    main, messages = in_thread(connection.next_message)
    for number in (numbers[2], numbers[0], numbers[1]):
        server.send(Told(number=number, value=number))
    server.send(AskReady(number=7))
    for thread in (main, *(thread for thread, _ in threads)):
        thread.join(10)
        assert not thread.is_alive()
    assert [results[0].value for _, results in threads] == numbers
    assert messages[0][0] == AskReady(number=7)


def test_messages_for_the_main_thread_wait_for_it_in_order(pair: tuple[Channel, ServerConnection]) -> None:
    server, connection = pair
    waiter = Waiter()
    number = connection.expect(waiter)
    server.send(AskReady(number=1))
    server.send(Released())
    server.send(Trim())
    server.send(Told(number=number))
    connection.wait(waiter.first)
    assert [type(connection.next_message()[0]) for _ in range(2)] == [AskReady, Trim]


def test_replies_reach_loops_while_no_thread_waits(pair: tuple[Channel, ServerConnection]) -> None:
    server, connection = pair
    arrived = threading.Event()

    class Woken(Waiter):
        def take(self, message: Reply | Told, payload: Any) -> None:
            super().take(message, payload)
            arrived.set()

    number = connection.expect(Woken(), is_async=True)
    server.send(Reply(number=number))
    assert arrived.wait(10)
    connection.forget(number, is_async=True)
    server.send(Trim())
    assert isinstance(connection.next_message()[0], Trim)
    server.shutdown()
    connection.poll()  # so ends the thread that received


def test_a_caller_that_left_is_known_until_its_batch_is_done(pair: tuple[Channel, ServerConnection]) -> None:
    server, connection = pair
    server.send(Cancelled(number=3))
    server.send(Cancelled(number=9))
    assert connection.is_cancelled(3)
    assert not connection.is_cancelled(4)
    connection.keep_request(4)
    server.send(Cancelled(number=4))
    connection.poll()
    connection.close_requests(range(2, 6))
    assert not connection.is_cancelled(3)
    assert connection.is_cancelled(4), "it goes on after its batch"
    assert connection.is_cancelled(9), "its batch comes later"
    connection.close_request(4)
    assert not connection.is_cancelled(4)


def test_a_sender_waits_for_room_or_for_the_end_of_its_caller(pair: tuple[Channel, ServerConnection]) -> None:
    server, connection = pair
    called: list[str] = []
    connection.watch(5, on_cancel=lambda: called.append("cancel"), on_room=lambda: called.append("room"))
    server.send(Room(number=5, has_room=False))
    assert not connection.has_room(5)
    server.send(Room(number=5, has_room=True))
    connection.wait_for_room(5)
    server.send(Room(number=5, has_room=False))
    server.send(Cancelled(number=5))
    connection.wait_for_room(5)
    assert called == ["room", "cancel", "room"]


def test_what_is_abandoned_is_forgotten(pair: tuple[Channel, ServerConnection]) -> None:
    server, connection = pair
    waiter = Waiter()
    number = connection.expect(waiter)
    connection.abandon(number, is_async=False)
    server.send(Told(number=number))
    server.send(Trim())
    connection.next_message()
    assert not waiter.replies


def test_posted_messages_are_sent(pair: tuple[Channel, ServerConnection]) -> None:
    server, connection = pair
    connection.post(Trim())
    assert isinstance(server.receive()[0], Trim)


def test_the_servers_end_wakes_everyone(pair: tuple[Channel, ServerConnection]) -> None:
    server, connection = pair

    def ended() -> str:
        try:
            connection.wait(Waiter().first)
        except PeerGoneError:
            return "gone"
        return "found"

    threads = [in_thread(ended) for _ in range(3)]
    server.shutdown()
    for thread, results in threads:
        thread.join(10)
        assert results == ["gone"]


def test_what_comes_while_the_receiver_is_awake_is_received(pair: tuple[Channel, ServerConnection]) -> None:
    server, connection = pair
    connection.stay_awake(50_000)
    main, messages = in_thread(lambda: [connection.next_message()[0] for _ in range(200)])
    for number in range(200):
        server.send(AskReady(number=number))
    main.join(20)
    assert [message.number for message in messages[0]] == list(range(200))


def test_the_end_is_noticed_awake(pair: tuple[Channel, ServerConnection]) -> None:
    server, connection = pair
    connection.stay_awake(1_000_000)
    server.shutdown()
    with pytest.raises(PeerGoneError):
        connection.next_message()
