"""The batcher driven by traces: a command, then what it is expected to print, then an empty line."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.batching import batching_config, request
from support.integrity import check_integrity
from support.manual_loop import ManualLoop

from modelserver.config.schema import ModelDynamicBatching, ModelQueuePolicy, TimeoutAction
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.errors import ServerError
from modelserver.scheduling.batcher import Batcher
from modelserver.scheduling.parked_workers import WaitingThread
from modelserver.telemetry.statistics import ModelStatistics
from tests.support.manual_clock import ManualClock

TRACES = sorted((Path(__file__).parent / "traces").glob("*.txt"))


class Trace:
    """One batcher on a manual clock; each command returns the lines that it causes."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.loop = ManualLoop(self.clock)
        self.worker = WaitingThread()
        self.requests: dict[str, InFlightRequest] = {}
        self.lines: list[str] = []

    def run(self, command: str) -> str:
        verb, *words = command.split()
        names = [word for word in words if "=" not in word]
        options = dict(word.split("=") for word in words if "=" in word)
        self.lines = []
        getattr(self, verb)(*names, **options)
        if verb != "config":
            check_integrity(self.batcher)
        return "\n".join(self.lines) or "ok"

    def config(self, **options: str) -> None:
        """Fields of ModelDynamicBatching, `batch_size`, and queue policies as `level<n>.field` (0: the default)."""
        max_batch_size = int(options.pop("max_batch_size", "8"))
        max_queue_size = int(options.pop("default_max_queue_size", "0"))
        is_dynamic = options.pop("dynamic", "yes") == "yes"
        policies: dict[int, dict[str, object]] = {}
        for key in [key for key in options if key.startswith("level")]:
            level, field = key.removeprefix("level").split(".")
            value = options.pop(key)
            policies.setdefault(int(level), {})[field] = (
                TimeoutAction[value] if field == "timeout_action" else int(value)
            )
        default = policies.pop(0, None)
        fields = {
            key: tuple(map(int, value.split(","))) if key == "preferred_batch_size" else int(value)
            for key, value in options.items()
        }
        batching = ModelDynamicBatching(
            default_queue_policy=ModelQueuePolicy(**default) if default else None,
            priority_queue_policy={level: ModelQueuePolicy(**policy) for level, policy in policies.items()},
            **fields,
        )
        config = batching_config(max_batch_size, dynamic_batching=batching if is_dynamic else None)
        self.batcher = Batcher(
            config,
            loop=self.loop,
            statistics=ModelStatistics(),
            clock=self.clock,
            default_max_queue_size=max_queue_size,
        )

    def submit(self, *names: str, **options: str) -> None:
        fields = {key: int(value) for key, value in options.items()}
        if "deadline_in_us" in fields:
            fields["deadline_ns"] = self.clock.now_ns() + fields.pop("deadline_in_us") * 1000
        for name in names:
            sent = self.requests[name] = request(**fields, id=name)
            try:
                self.batcher.submit(sent).subscribe(lambda response, name=name: self._answered(name, response))
            except ServerError as error:
                self.lines.append(f"{name} refused: {error.code.name}")

    def take(self) -> None:
        batch, wait_until_ns = self.batcher.try_take(self.worker)
        if batch is not None:
            self.lines.append(" ".join(taken.id for taken in batch.requests) + f" ({batch.rows} rows)")
        elif wait_until_ns is not None:
            self.lines.append(f"wait until {wait_until_ns // 1000} us")
        else:
            self.lines.append("nothing")

    def answer(self, *names: str) -> None:
        self.batcher.deliver([(self.requests[name], InferResponse()) for name in names])

    def cancel(self, name: str) -> None:
        self.requests[name].cancel()

    def advance(self, microseconds: str, timers: str = "run") -> None:
        self.clock.advance_us(int(microseconds))
        if timers == "run":
            self.loop.run_timers()

    def status(self) -> None:
        woken = " woken" if self.worker.is_woken else ""
        self.lines.append(f"{self.batcher.queue_depth} queued, {self.batcher.inflight} in flight{woken}")

    def stop(self) -> None:
        self.batcher.stop()

    def _answered(self, name: str, response: InferResponse) -> None:
        self.lines.append(f"{name} answered" + (f": {response.error.code.name}" if response.error else ""))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_trace(path: Path) -> None:
    trace = Trace()
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
    for block in filter(None, (block.strip() for block in text.split("\n\n"))):
        command, _, expected = block.partition("\n")
        assert trace.run(command) == expected, f"after: {command}"
