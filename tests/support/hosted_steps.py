"""Instances that go in steps, for tests of child processes; `create` is called in the child."""

from __future__ import annotations

import os
import time

from support.stepping import Counting

from modelserver.backend import Backend, BackendContext, BatchInstance, InferRequest, Measurement, Placement
from modelserver.config.schema import ModelConfig
from modelserver.execution.process.calls_to_server import server_connection
from modelserver.execution.process.step_host import StepHost


class Obedient(Counting):
    """Counts, and does to itself what the parameter `do` of a request says: `fail`, `break`, `exit` or `slowly`."""

    def __init__(self, most: int) -> None:
        super().__init__(most=most)
        self._pause_s = 0.0
        self._fails_always = False

    def add(self, request: InferRequest) -> None:
        super().add(request)
        action = request.parameters.get("do")
        if action == "exit":
            os._exit(9)
        if action == "slowly":
            self._pause_s = 0.002
        if action == "fail":
            self.error = ValueError("as asked")
        self._fails_always |= action == "break"

    def step(self) -> None:
        time.sleep(self._pause_s)
        if self._fails_always:
            self.error = RuntimeError("always")
        super().step()

    def measure(self) -> list[Measurement]:
        return [
            Measurement("test:steps", "counter", "Steps", float(self.num_steps), {"kind": "any"}),
            Measurement("test:aborted", "gauge", "Aborted", float(len(self.aborted))),
            Measurement("test:most", "histogram", "At once", 1.0, bounds=(1.0,), counts=(self.most_at_once, 0)),
        ]


class ObedientBackend(Backend):
    def create_instance(self, placement: Placement) -> Obedient:
        return Obedient(int(self.context.parameter("most", "1000")))


def create(*, most: int) -> BatchInstance:
    config = ModelConfig("m", backend="test", parameters={"most": str(most)})
    backend = ObedientBackend(BackendContext("m", 1, config, None, None))  # type: ignore[arg-type]  # it has no files
    return StepHost(backend, backend.create_instance(Placement("m_0")), server_connection())
