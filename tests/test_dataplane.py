"""What the data plane does itself: it refuses, counts and logs. The rest is tested over both protocols."""

from __future__ import annotations

import numpy as np
import pytest
from support.echo import EchoModel, echo_dataplane

from modelserver.core.datatype import Datatype
from modelserver.core.request import InferRequest
from modelserver.core.tensor import Tensor
from modelserver.dataplane import DataPlane
from modelserver.errors import ServerError, UnavailableError
from modelserver.telemetry.refusals import RefusalReason


def request_for(name: str, datatype: Datatype = Datatype.FP32, version: int | None = None) -> InferRequest:
    data = np.ones(2, datatype.numpy)
    return InferRequest(name, version, {"INPUT": Tensor("INPUT", datatype, data)}, id="r\n1")


def refused(dataplane: DataPlane, request: InferRequest) -> dict[str, int]:
    """What was counted in all, after a request that must be refused."""
    with pytest.raises(ServerError):
        dataplane.infer(request)
    return {reason.value: count for reason, count in dataplane.refusals.snapshot().items() if count}


def test_requests_that_reach_no_model_are_counted_by_reason() -> None:
    sleeping = EchoModel("sleeping")
    sleeping.ready = False
    dataplane = echo_dataplane(EchoModel(), sleeping)
    assert refused(dataplane, request_for("nobody")) == {"UNKNOWN_MODEL": 1}
    assert refused(dataplane, request_for("echo", version=7)) == {"UNKNOWN_MODEL": 2}
    assert refused(dataplane, request_for("echo", Datatype.INT8)) == {"UNKNOWN_MODEL": 2, "INVALID": 1}
    assert refused(dataplane, request_for("sleeping"))["UNAVAILABLE"] == 1
    dataplane.begin_shutdown()
    assert refused(dataplane, request_for("echo"))["UNAVAILABLE"] == 2
    assert set(dataplane.refusals.snapshot()) == set(RefusalReason)


async def test_what_a_model_accepts_or_counts_itself_is_not_counted() -> None:
    model = EchoModel()
    dataplane = echo_dataplane(model)
    await dataplane.infer(request_for("echo")).only()
    model.refuses = UnavailableError("the queue is full")
    assert refused(dataplane, request_for("echo")) == {}
