"""Random lives of sequences: whatever happens, order within a sequence and one answer for each request."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.batching import batching_config, request
from support.integrity import check_integrity
from support.manual_loop import ManualLoop

from modelserver.config.schema import (
    ModelConfig,
    ModelSequenceBatching,
    SequenceStrategyDirect,
    SequenceStrategyOldest,
)
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.errors import QueueFullError, ServerError, UnavailableError
from modelserver.scheduling.parked_workers import WaitingThread
from modelserver.scheduling.sequence import SequenceBatch, SequenceEnd
from modelserver.scheduling.sequence_batcher import InstanceSource, SequenceBatcher
from modelserver.telemetry.statistics import ModelStatistics
from tests.support.manual_clock import ManualClock

_IDLE_US = 1000
_STRATEGIES = (
    ModelSequenceBatching(direct=SequenceStrategyDirect(), max_sequence_idle_microseconds=_IDLE_US),
    ModelSequenceBatching(direct=SequenceStrategyDirect(500, 0.7), max_sequence_idle_microseconds=_IDLE_US),
    ModelSequenceBatching(oldest=SequenceStrategyOldest(3), max_sequence_idle_microseconds=_IDLE_US),
    ModelSequenceBatching(oldest=SequenceStrategyOldest(3, (2,), 500, True), max_sequence_idle_microseconds=_IDLE_US),
)


class Instance:
    """A worker by hand: what it has, and what it was told of ends."""

    def __init__(self, machine: SequenceLives) -> None:
        self.machine = machine
        self.worker = WaitingThread()
        self.batch: SequenceBatch | None = None
        self.source: InstanceSource = machine.batcher.source(self.tell)

    def tell(self, sequence_id: int | str, end: SequenceEnd) -> None:
        self.machine.lives.pop((self, sequence_id), None)


class SequenceLives(RuleBasedStateMachine):
    """`lives` is what each instance knows of sequences that it has seen begin: the row they are in."""

    @initialize(
        batching=st.sampled_from(_STRATEGIES),
        max_batch_size=st.integers(1, 3),
        count=st.integers(1, 2),
        is_fair=st.booleans(),
        max_queue_size=st.sampled_from([0, 6]),
    )
    def begin(
        self, batching: ModelSequenceBatching, max_batch_size: int, count: int, is_fair: bool, max_queue_size: int
    ) -> None:
        config: ModelConfig = batching_config(max_batch_size, sequence_batching=batching)
        self.is_direct = batching.oldest is None
        self.clock = ManualClock()
        self.loop = ManualLoop(self.clock)
        self.batcher = SequenceBatcher(
            config,
            loop=self.loop,
            statistics=ModelStatistics(),
            clock=self.clock,
            default_max_queue_size=max_queue_size,
            is_fair=is_fair,
            is_adaptive=is_fair,
        )
        self.lives: dict[tuple[Instance, int | str], int] = {}
        self.open: dict[InFlightRequest, int] = {}
        self.executed: dict[int, list[int]] = {}
        self.num_sent = 0
        self.is_stopped = False
        self.instances = [Instance(self) for _ in range(count)]

    @rule(
        sequence_id=st.integers(1, 6),
        is_start=st.booleans(),
        is_end=st.booleans(),
        timeout_us=st.sampled_from([0, 0, 300]),
    )
    def submit(self, sequence_id: int, is_start: bool, is_end: bool, timeout_us: int) -> None:
        self.num_sent += 1
        number = self.num_sent
        sent = request(
            id=str(number),
            sequence_id=sequence_id,
            sequence_start=is_start,
            sequence_end=is_end,
            timeout_us=timeout_us,
            caller=f"caller {sequence_id % 3}",
        )
        was_known = self.batcher.has_sequence(sequence_id)
        try:
            stream = self.batcher.submit(sent)
        except QueueFullError:
            return
        except ServerError:
            assert (not is_start and not was_known) or self.is_stopped, "a request that fits was refused"
            return
        assert is_start or was_known, "a request of no sequence was taken"
        self.open[sent] = number
        stream.subscribe(lambda _: self.open.pop(sent))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(list(self.open))).cancel()

    @rule(which=st.integers(0, 1))
    def work(self, which: int) -> None:
        instance = self.instances[which % len(self.instances)]
        if instance.worker.is_left:
            return
        former = instance.batch
        batch, _ = instance.source.try_take(instance.worker)
        assert batch is None or isinstance(batch, SequenceBatch)
        instance.batch = batch
        if former is not None:
            real = [sent for sent in former.requests if not sent.is_padding]
            self.batcher.deliver([(sent, InferResponse()) for sent in real])
        if batch is not None:
            self.check_batch(instance, batch)

    def check_batch(self, instance: Instance, batch: SequenceBatch) -> None:
        real = [(row, sent) for row, sent in enumerate(batch.requests) if not sent.is_padding]
        ids = [sent.sequence_id for _, sent in real]
        assert len(set(ids)) == len(ids), "two requests of one sequence in a batch"
        assert len(real) == len(batch.requests) - batch.num_padding, "padding is miscounted"
        for row, sent in real:
            assert sent in self.open, "an answered request is executed"
            key = (instance, sent.sequence_id)
            if sent.sequence_start:
                self.lives[key] = row
                self.executed[int(sent.sequence_id)] = []
            assert key in self.lives, "a sequence goes on where it did not begin"
            assert not self.is_direct or self.lives[key] == row, "a sequence changed its row"
            before = self.executed[int(sent.sequence_id)]
            assert before == sorted(before), "requests of a sequence were executed out of order"
            assert not before or before[-1] < self.open[sent], "a request came before an older one"
            before.append(self.open[sent])

    @rule(us=st.sampled_from([1, 200, 600, _IDLE_US + 1]))
    def advance(self, us: int) -> None:
        self.clock.advance_us(us)
        self.loop.run_timers()

    @rule(which=st.integers(0, 1))
    def give_up(self, which: int) -> None:
        self.instances[which % len(self.instances)].source.give_up()

    @rule()
    def stop(self) -> None:
        self.is_stopped = True
        self.batcher.stop()

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "batcher"):
            check_integrity(self.batcher)
            assert self.batcher.inflight == len(self.open), "the number of requests in flight is wrong"

    def teardown(self) -> None:
        if not hasattr(self, "batcher"):
            return
        self.batcher.abort(UnavailableError("gone"))
        for instance in self.instances:
            instance.source.close_worker(instance.worker)
            while not instance.worker.is_left:
                self.work(self.instances.index(instance))
        assert not self.open, "a request was never answered"
        assert self.batcher.num_sequences == 0, "a sequence outlived its model"


TestSequenceLives = SequenceLives.TestCase
TestSequenceLives.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
