"""Which request comes next: in turn, or step by step of a sequence."""

from __future__ import annotations

import json
from collections import defaultdict

import numpy as np
import pytest

from modelserver.bench.encode import RequestForm
from modelserver.bench.feed import make_feed
from modelserver.bench.tensors import InputTensor
from modelserver.bench.work import Sequences, Share, Template, Transport, Work
from modelserver.client.address import Address
from modelserver.client.grpc_messages import unframe
from modelserver.client.heads import HttpRequestHead
from modelserver.client.lane import Lane
from modelserver.core.datatype import Datatype
from modelserver.pb import grpc_service_pb2 as pb

ADDRESS = Address("localhost", 1)


class NoAnswers:
    def answered(self, lane: Lane, now_ns: int, failure: str | None) -> None:
        raise AssertionError("nothing is sent")

    def responded(self, lane: Lane) -> None:
        raise AssertionError("nothing is sent")


class IdleLane(Lane):
    def send(self, request: bytes) -> None:
        raise AssertionError("nothing is sent")

    async def connect(self) -> None:
        """There is no server."""

    def close(self) -> None:
        """Nothing is open."""


def lanes(count: int) -> list[Lane]:
    found: list[Lane] = [IdleLane(NoAnswers()) for _ in range(count)]
    for index, lane in enumerate(found):
        lane.index = index
    return found


def template(value: int, transport: Transport, *, has_sequence: bool) -> Template:
    tensor = InputTensor("A", Datatype.INT32, (1,), np.array([value], np.int32).tobytes())
    form = RequestForm("m", "", has_sequence=has_sequence)
    if transport is Transport.HTTP:
        return form.http(HttpRequestHead(ADDRESS, "POST", "/x"), [tensor], {})
    return form.grpc([tensor], {}, asks_for_final=False)


def read(request: bytes, transport: Transport) -> tuple[int, int, bool, bool]:
    """The input's value, and id, start and end of its sequence."""
    if transport is Transport.HTTP:
        head, _, body = request.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
        assert int(fields["Content-Length"]) == len(body)
        json_len = int(fields["Inference-Header-Content-Length"])
        parameters = json.loads(body[:json_len])["parameters"]
        value = int(np.frombuffer(body[json_len:], np.int32)[0])
        return value, parameters["sequence_id"], parameters["sequence_start"], parameters["sequence_end"]
    message = pb.ModelInferRequest.FromString(unframe(request, "none"))
    value = int(np.frombuffer(message.raw_input_contents[0], np.int32)[0])
    found = message.parameters
    return value, found["sequence_id"].int64_param, found["sequence_start"].bool_param, found["sequence_end"].bool_param


def work(transport: Transport, streams: tuple[tuple[int, ...], ...], sequences: Sequences | None) -> Work:
    has_sequence = sequences is not None
    return Work(
        transport=transport,
        address=ADDRESS,
        streams=tuple(tuple(template(value, transport, has_sequence=has_sequence) for value in one) for one in streams),
        sequences=sequences,
    )


def test_requests_come_in_turn() -> None:
    given = work(Transport.HTTP, ((1, 2), (3,)), None)
    feed = make_feed(given, Share(1, 2))
    (lane,) = lanes(1)
    assert [feed.next(lane)[-4] for _ in range(4)] == [2, 3, 1, 2]
    assert feed.template(lane.step) is given.streams[0][1]


@pytest.mark.parametrize("transport", [Transport.HTTP, Transport.GRPC])
def test_sequences_begin_go_on_and_end_with_ids_of_their_own(transport: Transport) -> None:
    feed = make_feed(work(transport, ((1, 2, 3), (7, 8)), Sequences(first_id=10, length=None)), Share(0, 1))
    seen = defaultdict(list)
    for _ in range(9):
        for lane in lanes(2):
            value, sequence_id, is_start, is_end = read(feed.next(lane), transport)
            seen[sequence_id].append((value, is_start, is_end))
    assert seen[10] == [(1, True, False), (2, False, False), (3, False, True)]
    assert seen[11] == [(7, True, False), (8, False, True)]
    assert min(seen) == 10
    assert max(seen) >= 14


def test_lengths_vary_within_the_percentage() -> None:
    sequences = Sequences(length=20, variation=50)
    feed = make_feed(work(Transport.GRPC, ((1,),), sequences), Share(0, 1))
    (lane,) = lanes(1)
    lengths = defaultdict(int)
    for _ in range(2000):
        lengths[read(feed.next(lane), Transport.GRPC)[1]] += 1
    whole = list(lengths.values())[:-1]
    assert 10 <= min(whole) < 15
    assert 25 < max(whole) <= 30


def test_processes_use_different_ids_within_the_range() -> None:
    sequences = Sequences(first_id=5, end_id=11, length=1, variation=0)
    found = []
    for index in range(3):
        feed = make_feed(work(Transport.GRPC, ((1,),), sequences), Share(index, 3))
        (lane,) = lanes(1)
        found.append({read(feed.next(lane), Transport.GRPC)[1] for _ in range(10)})
    assert found == [{5, 8}, {6, 9}, {7, 10}]
