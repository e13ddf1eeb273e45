from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator

import numpy as np
import pytest
from support.integrity import check_integrity

from modelserver.core.datatype import Datatype
from modelserver.core.tensor import Tensor
from modelserver.execution.process.channel import Channel, PeerGoneError
from modelserver.execution.process.messages import AskReady, Execute, RequestRecord, Told
from modelserver.execution.process.packing import Payload, unpack
from modelserver.execution.process.shared_buffer import SharedBuffer

MIB = 1 << 20


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    forth, back = SharedBuffer.create("forth"), SharedBuffer.create("back")
    channels = (
        Channel(ours, forth, back),
        Channel(theirs, SharedBuffer(os.dup(back.fd)), SharedBuffer(os.dup(forth.fd))),
    )
    yield channels
    for channel in channels:
        channel.close()


def send(channel: Channel, data: np.ndarray, parameters: dict | None = None) -> None:
    payload = Payload()
    record = payload.add(Tensor("x", Datatype.UINT8, data))
    request = RequestRecord("m", 1, [record], "", None, parameters or {}, 0, 0, None, 0, False, False, 1)
    channel.send(Execute(requests=[request], sizes=[1]), payload)


def receive(channel: Channel) -> np.ndarray:
    message, payload = channel.receive()
    assert isinstance(message, Execute)
    return unpack(message.requests[0].inputs[0], payload).data


@pytest.mark.parametrize("count", [0, 1, 1000, 24 << 10, (24 << 10) + 1, MIB, 5 * MIB + 3])
def test_a_tensor_of_any_size_arrives(pair: tuple[Channel, Channel], count: int) -> None:
    data = np.arange(count, dtype=np.uint64).astype(np.uint8)
    send(pair[0], data)
    np.testing.assert_array_equal(receive(pair[1]), data)


def test_a_record_of_any_size_arrives(pair: tuple[Channel, Channel]) -> None:
    text = "p" * (3 * MIB)
    send(pair[0], np.zeros(1, np.uint8), {"long": text})
    message, _ = pair[1].receive()
    assert isinstance(message, Execute)
    assert message.requests[0].parameters["long"] == text


def test_a_lease_returns_only_when_the_last_view_died(pair: tuple[Channel, Channel]) -> None:
    near, far = pair
    send(near, np.full(MIB, 1, np.uint8))
    kept = receive(far)[10:20].reshape(2, 5)
    for number in range(2, 6):
        far.send(Told())
        near.receive()
        send(near, np.full(MIB, number, np.uint8))
        assert receive(far)[0] == number
    assert kept.tolist() == [[1] * 5] * 2
    del kept
    gc.collect()
    far.send(Told())
    near.receive()
    assert near.arena.num_leases == 0
    check_integrity(near.arena)


def test_steady_traffic_uses_one_place(pair: tuple[Channel, Channel]) -> None:
    near, far = pair
    for number in range(50):
        send(near, np.full(MIB, number, np.uint8))
        assert receive(far)[-1] == number
        far.send(Told())
        near.receive()
    assert near.arena.buffer.nbytes == MIB


def test_views_stay_valid_after_the_channel_closed(pair: tuple[Channel, Channel]) -> None:
    send(pair[0], np.full(MIB, 9, np.uint8))
    view = receive(pair[1])
    pair[0].close()
    pair[1].close()
    assert np.all(view == 9)


def test_a_peer_that_hung_up_is_told_from_one_that_never_read(pair: tuple[Channel, Channel]) -> None:
    near, far = pair
    near.send(AskReady(number=1))
    far.close()
    with pytest.raises(PeerGoneError) as unread:
        near.receive()
    assert unread.value.was_unread
    with pytest.raises(PeerGoneError) as ended:
        near.receive()
    assert not ended.value.was_unread
    with pytest.raises(PeerGoneError) as refused:
        near.send(AskReady(number=2))
    assert refused.value.was_unread
