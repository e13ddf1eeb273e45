"""The sequence batcher driven by traces: a command, then what it is expected to print, then an empty line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.batching import batching_config, request
from support.integrity import check_integrity
from support.manual_loop import ManualLoop

from modelserver.config.schema import (
    ModelSequenceBatching,
    SequenceStrategyDirect,
    SequenceStrategyOldest,
)
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.errors import ServerError, UnavailableError
from modelserver.scheduling.hold import Hold
from modelserver.scheduling.parked_workers import WaitingThread
from modelserver.scheduling.sequence import SequenceBatch, SequenceEnd
from modelserver.scheduling.sequence_batcher import InstanceSource, SequenceBatcher
from modelserver.telemetry.statistics import ModelStatistics
from tests.support.manual_clock import ManualClock

TRACES = sorted((Path(__file__).parent / "sequence_traces").glob("*.txt"))
_FIELDS: dict[str, Callable[[str], object]] = {
    "minimum_slot_utilization": float,
    "preferred_batch_size": lambda text: tuple(map(int, text.split(","))),
}


class Trace:
    """One batcher on a manual clock; each command returns the lines that it causes.

    A request is named `<sequence><number>`: `a1` is of sequence a. `+` before it is START, `-` after it END.
    """

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.loop = ManualLoop(self.clock)
        self.requests: dict[str, InFlightRequest] = {}
        self.lines: list[str] = []
        self.instances: list[tuple[InstanceSource, WaitingThread]] = []
        self.batches: dict[int, SequenceBatch] = {}

    def run(self, command: str) -> str:
        verb, *words = command.split()
        names = [word for word in words if "=" not in word]
        options = dict(word.split("=") for word in words if "=" in word)
        self.lines = []
        getattr(self, verb)(*names, **options)
        check_integrity(self.batcher)
        return "\n".join(self.lines) or "ok"

    def config(self, strategy: str, **options: str) -> None:
        """Fields of the strategy, `idle` in microseconds, `max_batch_size`, `instances`, a hold, and switches."""
        max_batch_size = int(options.pop("max_batch_size", "4"))
        num_instances = int(options.pop("instances", "1"))
        idle_us = int(options.pop("idle", "1000000"))
        hold = Hold(int(options.pop("hold", "0")), int(options.pop("hold_backlog", "0")))
        max_queue_size = int(options.pop("default_max_queue_size", "0"))
        is_iterative, is_fair, is_adaptive = (
            options.pop(name, "no") == "yes" for name in ("iterative", "fair", "adaptive")
        )
        fields = {key: _FIELDS.get(key, int)(value) for key, value in options.items()}
        is_direct = strategy == "direct"
        config = batching_config(
            max_batch_size,
            sequence_batching=ModelSequenceBatching(
                direct=SequenceStrategyDirect(**fields) if is_direct else None,
                oldest=None if is_direct else SequenceStrategyOldest(**fields),
                max_sequence_idle_microseconds=idle_us,
                iterative_sequence=is_iterative,
            ),
        )
        self.batcher = SequenceBatcher(
            config,
            loop=self.loop,
            statistics=ModelStatistics(),
            clock=self.clock,
            default_max_queue_size=max_queue_size,
            hold=hold if hold != Hold() else None,
            is_fair=is_fair,
            is_adaptive=is_adaptive,
        )
        for _ in range(num_instances):
            self.add_instance()

    def add_instance(self) -> None:
        number = len(self.instances)

        def tell(sequence_id: int | str, end: SequenceEnd) -> None:
            self.lines.append(f"{number} hears: {sequence_id} {end.value}")

        self.instances.append((self.batcher.source(tell), WaitingThread()))

    def submit(self, *names: str, **options: str) -> None:
        fields: dict[str, Any] = {key: value if key == "caller" else int(value) for key, value in options.items()}
        if "deadline_in_us" in fields:
            fields["deadline_ns"] = self.clock.now_ns() + fields.pop("deadline_in_us") * 1000
        for word in names:
            name = word.strip("+-")
            sent = self.requests[name] = request(
                **fields,
                id=name,
                sequence_id=name.rstrip("0123456789"),
                sequence_start=word.startswith("+"),
                sequence_end=word.endswith("-"),
            )
            try:
                self.batcher.submit(sent).subscribe(lambda response, name=name: self._answered(name, response))
            except ServerError as error:
                self.lines.append(f"{name} refused: {error.code.name}")

    def take(self, instance: str = "0") -> None:
        """What the instance had before is executed, and answered; then it takes the next batch."""
        number = int(instance)
        source, worker = self.instances[number]
        former = self.batches.pop(number, None)
        batch, wait_until_ns = source.try_take(worker)
        if former is not None:
            answers = [sent for sent in former.requests if sent not in former.rescheduled]
            self.batcher.deliver([(sent, InferResponse()) for sent in answers])
        if batch is not None:
            assert isinstance(batch, SequenceBatch)
            self.batches[number] = batch
            self.lines.append(" ".join("_" if sent.is_padding else sent.id for sent in batch.requests))
        elif wait_until_ns is not None:
            self.lines.append(f"wait until {wait_until_ns // 1000} us")
        else:
            self.lines.append("left" if worker.is_left else "nothing")

    def reschedule(self, name: str) -> None:
        """The model will not be done with the request when its batch is."""
        for batch in self.batches.values():
            if self.requests[name] in batch.requests:
                batch.rescheduled.append(self.requests[name])

    def cancel(self, name: str) -> None:
        self.requests[name].cancel()

    def advance(self, microseconds: str) -> None:
        self.clock.advance_us(int(microseconds))
        self.loop.run_timers()

    def late(self, microseconds: str) -> None:
        """Time passes, and the event loop is too busy for its timers."""
        self.clock.advance_us(int(microseconds))

    def close(self, instance: str) -> None:
        source, worker = self.instances[int(instance)]
        source.close_worker(worker)

    def stop(self) -> None:
        self.batcher.stop()

    def abort(self) -> None:
        self.batcher.abort(UnavailableError("unloaded"))

    def status(self) -> None:
        woken = [str(number) for number, (_, worker) in enumerate(self.instances) if worker.is_woken]
        text = f"{self.batcher.queue_depth} queued, {self.batcher.inflight} in flight"
        text += f", {self.batcher.num_sequences} sequences"
        self.lines.append(text + (f", woken {' '.join(woken)}" if woken else ""))

    def _answered(self, name: str, response: InferResponse) -> None:
        self.lines.append(f"{name} answered" + (f": {response.error.code.name}" if response.error else ""))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_trace(path: Path) -> None:
    trace = Trace()
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
    for block in filter(None, (block.strip() for block in text.split("\n\n"))):
        command, _, expected = block.partition("\n")
        assert trace.run(command) == expected, f"after: {command}"
