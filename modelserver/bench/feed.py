"""Chooses the next request of a lane: the data in turn, or the next step of its sequence."""

from __future__ import annotations

import random
from typing import Protocol

from modelserver.bench.work import Sequences, Share, Template, Transport, Work
from modelserver.client.grpc_messages import frame
from modelserver.client.lane import Lane
from modelserver.pb import grpc_service_pb2 as pb

# Space in an HTTP template for the parameters of a sequence.
HOLE_BYTES = 100


class Feed(Protocol):
    def next(self, lane: Lane) -> bytes:
        """The next request of `lane`, complete; sets `lane.step`."""


class TensorFeed(Feed, Protocol):
    def template(self, step: int) -> Template:
        """The template that a lane's `step` stands for."""


class CycleFeed:
    """Repeats the same requests, encoded once."""

    def __init__(self, work: Work, share: Share) -> None:
        self._templates = [template for stream in work.streams for template in stream]
        self._requests = [
            template.content if work.transport is Transport.HTTP else frame(template.content, work.algorithm)
            for template in self._templates
        ]
        self._place = share.index % len(self._requests)

    def next(self, lane: Lane) -> bytes:
        place = self._place
        lane.step = place
        self._place = place + 1 if place + 1 < len(self._requests) else 0
        return self._requests[place]

    def template(self, step: int) -> Template:
        return self._templates[step]


class _Playing:
    """A sequence on its way."""

    __slots__ = ("length", "num_sent", "sequence_id", "stream")

    def __init__(self, sequence_id: int, stream: int, length: int) -> None:
        self.sequence_id = sequence_id
        self.stream = stream
        self.length = length
        self.num_sent = 0


class SequenceFeed:
    """A sequence per lane: start flag, steps in order, end flag, then the next sequence with a new id."""

    def __init__(self, work: Work, sequences: Sequences, share: Share) -> None:
        self._work = work
        self._sequences = sequences
        self._share = share
        self._streams = work.streams
        self._offsets = [sum(len(stream) for stream in work.streams[:place]) for place in range(len(work.streams))]
        self._templates = [template for stream in work.streams for template in stream]
        self._playing: dict[int, _Playing] = {}
        self._num_begun = 0
        # Lengths, not secrets.
        self._random = random.Random(f"{work.seed}/sequences/{share.index}")  # noqa: S311

    def next(self, lane: Lane) -> bytes:
        playing = self._playing.get(lane.index)
        if playing is None or playing.num_sent >= playing.length:
            self._playing[lane.index] = playing = self._begin()
        stream = self._streams[playing.stream]
        place = playing.num_sent % len(stream)
        lane.step = self._offsets[playing.stream] + place
        is_start = playing.num_sent == 0
        playing.num_sent += 1
        return self._render(stream[place], playing.sequence_id, is_start, playing.num_sent == playing.length)

    def template(self, step: int) -> Template:
        return self._templates[step]

    def _begin(self) -> _Playing:
        number = self._num_begun * self._share.num_workers + self._share.index
        self._num_begun += 1
        first, end = self._sequences.first_id, self._sequences.end_id
        sequence_id = first + (number if end is None else number % (end - first))
        stream = number % len(self._streams)
        return _Playing(sequence_id, stream, self._length(stream))

    def _length(self, stream: int) -> int:
        base = self._sequences.length
        if base is None:
            return len(self._streams[stream])
        spread = base * self._sequences.variation / 100
        return max(1, round(self._random.uniform(base - spread, base + spread)))

    def _render(self, template: Template, sequence_id: int, is_start: bool, is_end: bool) -> bytes:
        if self._work.transport is Transport.HTTP:
            text = (
                f',"sequence_id":{sequence_id},"sequence_start":{str(is_start).lower()}'
                f',"sequence_end":{str(is_end).lower()}'
            )
            content, hole = template.content, template.hole
            assert hole >= 0, "the templates of sequences have a hole"
            return content[:hole] + text.encode().ljust(HOLE_BYTES) + content[hole + HOLE_BYTES :]
        # Fields of a message may come in any order: these are added at its end.
        added = pb.ModelInferRequest()
        added.parameters["sequence_id"].int64_param = sequence_id
        added.parameters["sequence_start"].bool_param = is_start
        added.parameters["sequence_end"].bool_param = is_end
        return frame(template.content + added.SerializeToString(), self._work.algorithm)


def make_feed(work: Work, share: Share) -> TensorFeed:
    return SequenceFeed(work, work.sequences, share) if work.sequences is not None else CycleFeed(work, share)
