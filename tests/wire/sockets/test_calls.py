"""The system calls in C and in Python give the same, and say what is wrong with what they are given."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from support.socket_ends import CALL_TWINS, calls_twin

from modelserver.wire.sockets import calls
from modelserver.wire.sockets.calls import NOTHING

__all__ = ["calls_twin"]
pytestmark = pytest.mark.usefixtures("calls_twin")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def test_bytes_come_and_go(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    buffer = memoryview(bytearray(10))
    assert calls.receive(ours.fileno(), buffer) == NOTHING
    assert calls.receive_soon(ours.fileno(), buffer, 1000) == NOTHING
    theirs.sendall(b"twelve bytes")
    assert calls.receive(ours.fileno(), buffer) == 10
    assert calls.receive_soon(ours.fileno(), buffer, 1000) == 2
    assert bytes(buffer) == b"eselve byt"
    for data in (b"abc", bytearray(b"abc"), memoryview(b"_abc_")[1:4]):
        assert calls.transmit(ours.fileno(), data) == 3
        assert theirs.recv(10) == b"abc"
    assert calls.transmit(ours.fileno(), b"") == 0
    theirs.close()
    assert calls.receive(ours.fileno(), buffer) == 0
    assert calls.receive_soon(ours.fileno(), buffer, 1000) == 0
    with pytest.raises(BrokenPipeError):
        calls.transmit(ours.fileno(), b"x")


def test_what_has_no_room_is_not_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = pair
    data = bytes(1 << 24)
    num_sent = calls.transmit(ours.fileno(), data)
    assert 0 < num_sent < len(data)
    assert calls.transmit(ours.fileno(), data) == 0


def test_what_comes_while_it_is_waited_for(pair: tuple[socket.socket, socket.socket], calls_twin: str) -> None:
    ours, theirs = pair
    buffer = memoryview(bytearray(10))
    sender = threading.Thread(target=lambda: (time.sleep(0.05), theirs.sendall(b"x")))
    sender.start()
    began_s = time.monotonic()
    num_bytes = calls.receive_soon(ours.fileno(), buffer, 10_000_000_000)
    took_s = time.monotonic() - began_s
    sender.join(10)
    assert num_bytes == (1 if calls_twin == "c" else NOTHING), "the other thread could run meanwhile"
    assert took_s < 5


def test_what_is_no_socket(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = pair
    number = ours.fileno()
    ours.close()
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        calls.receive(number, memoryview(bytearray(1)))
    assert caught.value.errno == errno.EBADF
    with pytest.raises(OSError, match="Bad file descriptor"):
        calls.transmit(number, b"x")


@pytest.mark.skipif("c" not in CALL_TWINS, reason="the part in C was not built")
def test_the_part_in_c_refuses_what_makes_no_sense(pair: tuple[socket.socket, socket.socket], calls_twin: str) -> None:
    if calls_twin != "c":
        return
    number = pair[0].fileno()
    for arguments in ((), (number,), (number, b"x", 1)):
        with pytest.raises(TypeError, match="transmit takes 2 arguments"):
            calls.transmit(*arguments)
    with pytest.raises(TypeError):
        calls.transmit(number, "text")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        calls.transmit("1", b"x")  # type: ignore[arg-type]
    for descriptor in (-1, 1 << 40):
        with pytest.raises(ValueError, match=f"expected a file descriptor, got {descriptor}"):
            calls.transmit(descriptor, b"x")
    with pytest.raises(BufferError):
        calls.receive(number, memoryview(b"read-only"))
    with pytest.raises(TypeError):
        calls.serve_one(number, "no watcher")  # type: ignore[arg-type]
    with pytest.raises((TypeError, AttributeError)):
        calls.serve("no set", {})  # type: ignore[arg-type]
