"""What the data plane does itself: it refuses, counts and logs. The rest is tested over both protocols."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest
from support.echo import EchoModel, echo_dataplane

from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest, RequestForm
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.core.tensor import Tensor
from modelserver.errors import InternalError, ServerError, UnavailableError
from modelserver.planes.data import DataPlane
from modelserver.telemetry.counts import RefusalReason


def request_for(name: str, datatype: Datatype = Datatype.FP32, version: int | None = None) -> InFlightRequest:
    data = np.ones(2, datatype.numpy)
    return InFlightRequest(
        model_name=name, version=version, inputs={"INPUT": Tensor("INPUT", datatype, data)}, id="r\n1"
    )


def refused(dataplane: DataPlane, request: InFlightRequest) -> dict[str, int]:
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


async def test_each_request_is_a_line_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    model = EchoModel()
    dataplane = echo_dataplane(model, logs_requests=True)
    await dataplane.infer(request_for("echo")).only()
    model.respond = lambda _: [InferResponse(is_final=False), InferResponse(error=InternalError("it broke"))]
    with pytest.raises(InternalError):
        await dataplane.infer(request_for("echo")).only()
    refused(dataplane, request_for("nobody"))
    model.refuses = UnavailableError("the queue is full")
    refused(dataplane, request_for("echo"))
    lines = [re.sub(r"[\d.]+ ms$", "_ ms", record.getMessage()) for record in caplog.records]
    assert lines == [
        "infer 'echo' version 1 id 'r\\n1' rows 1: ok, _ ms",
        "infer 'echo' version 1 id 'r\\n1' rows 1: internal: it broke, _ ms",
        "infer 'nobody' id 'r\\n1' rows 1: refused, not_found: Request for unknown model: 'nobody' is not found",
        "infer 'echo' version 1 id 'r\\n1' rows 1: refused, unavailable: the queue is full",
    ]


async def test_no_line_without_being_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    dataplane = echo_dataplane(EchoModel())
    stream = dataplane.infer(request_for("echo"))
    assert type(stream) is ResponseStream
    await stream.only()
    assert not caplog.records


async def test_requests_of_one_form_are_checked_once_for_each_signature() -> None:
    model = EchoModel(dims=(2,), max_batch_size=4)
    dataplane = echo_dataplane(model)
    form = RequestForm()

    def request(shape: tuple[int, ...]) -> InFlightRequest:
        return InFlightRequest(
            model_name="echo",
            version=None,
            inputs={"INPUT": Tensor("INPUT", Datatype.FP32, np.ones(shape, "f4"))},
            form=form,
        )

    for _ in range(2):
        sent = request((3, 2))
        await dataplane.infer(sent).only()
        assert (sent.rows, form.rows, form.signature) == (3, 3, model.signature)
    # As a reload: what fitted the old config is checked against the new one, each time that it does not fit.
    model.signature = EchoModel(dims=(7,), max_batch_size=4).signature
    for count in (1, 2):
        assert refused(dataplane, request((3, 2))) == {"INVALID": count}
    model.signature = EchoModel(dims=(2,), max_batch_size=8).signature
    await dataplane.infer(request((3, 2))).only()
    assert form.signature is model.signature
