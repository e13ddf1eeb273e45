"""Whatever bytes come in, the caller is told what is wrong with them; it is never our fault."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.echo import EchoControlPlane, EchoModel, echo_dataplane
from support.grpc_calls import OpenStream, RefusedError, call_unary

from modelserver.app.frontends import grpc_frontend
from modelserver.core.datatype import Datatype
from modelserver.frontends.grpc.frontend import GrpcFrontend
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.protocol.grpc_status import Status

CALLERS_FAULT = (Status.INVALID_ARGUMENT, Status.NOT_FOUND, Status.UNIMPLEMENTED, Status.RESOURCE_EXHAUSTED)

NAMES = st.sampled_from(["INPUT", "OUTPUT", "", "x"])
PARAMETERS = st.dictionaries(
    st.sampled_from(["a", "priority", "timeout", "sequence_id", "sequence_start", "triton_x", "classification"]),
    st.one_of(
        st.builds(pb.InferParameter),
        st.builds(pb.InferParameter, int64_param=st.integers(-(1 << 63), (1 << 63) - 1)),
        st.builds(pb.InferParameter, string_param=st.text(max_size=5)),
        st.builds(pb.InferParameter, bool_param=st.booleans()),
    ),
    max_size=2,
)
CONTENTS = st.one_of(
    st.none(),
    st.builds(pb.InferTensorContents, int_contents=st.lists(st.integers(-300, 300), max_size=4)),
    st.builds(pb.InferTensorContents, fp32_contents=st.lists(st.floats(width=32), max_size=4)),
    st.builds(pb.InferTensorContents, bytes_contents=st.lists(st.binary(max_size=4), max_size=4)),
)
TENSORS = st.builds(
    pb.ModelInferRequest.InferInputTensor,
    name=NAMES,
    datatype=st.sampled_from([datatype.value for datatype in Datatype] + ["", "FP8"]),
    shape=st.lists(st.integers(-2, 4) | st.sampled_from([1 << 31, (1 << 63) - 1, -(1 << 63)]), max_size=3),
    parameters=PARAMETERS,
    contents=CONTENTS,
)
REQUESTS = st.builds(
    pb.ModelInferRequest,
    model_name=st.sampled_from(["echo", "echo_BYTES", "batched", "no"]),
    model_version=st.sampled_from(["", "1", "x"]),
    id=st.text(max_size=3),
    parameters=PARAMETERS,
    inputs=st.lists(TENSORS, max_size=3),
    outputs=st.lists(st.builds(pb.ModelInferRequest.InferRequestedOutputTensor, name=NAMES), max_size=2),
    raw_input_contents=st.lists(st.binary(max_size=20), max_size=3),
)


def frontend() -> GrpcFrontend:
    models = EchoModel(), EchoModel("echo_BYTES", Datatype.BYTES), EchoModel("batched", max_batch_size=2)
    return grpc_frontend(echo_dataplane(*models), EchoControlPlane())  # type: ignore[arg-type]


def valid_message(size: int) -> bytes:
    data = np.arange(size, dtype=np.float32)
    request = pb.ModelInferRequest(model_name="echo", id="q", raw_input_contents=[data.tobytes()])
    request.inputs.add(name="INPUT", datatype="FP32", shape=data.shape)
    request.parameters["a"].string_param = "b"
    return request.SerializeToString()


async def ends_well(message: bytes) -> None:
    methods = frontend().methods
    status = Status.OK
    try:
        await call_unary(methods, "ModelInfer", message, pb.ModelInferResponse)
    except RefusedError as error:
        status = error.status
    assert status in (Status.OK, *CALLERS_FAULT)
    stream = OpenStream(methods["/inference.GRPCInferenceService/ModelStreamInfer"])
    stream.send(message)
    stream.half_close()
    reply = await stream.receive(pb.ModelStreamInferResponse)
    assert (reply.error_message == "") == (status is Status.OK)
    assert await stream.status() == (Status.OK, "")


@settings(deadline=None)
@given(REQUESTS)
def test_well_formed_nonsense(request: pb.ModelInferRequest) -> None:
    asyncio.run(ends_well(request.SerializeToString()))


@settings(deadline=None)
@given(st.binary(max_size=100))
def test_random_bytes(message: bytes) -> None:
    asyncio.run(ends_well(message))


@pytest.mark.parametrize("size", [4, 10_000])
@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_damaged_messages(size: int, data: st.DataObject) -> None:
    message = bytearray(valid_message(size))
    # The head, where the structure is, deserves most of the damage.
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, min(60, len(message) - 1)))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([len(message), len(message) // 2, 30]))
    asyncio.run(ends_well(bytes(message[:cut])))
