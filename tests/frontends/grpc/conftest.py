"""A gRPC frontend over echo models, without a socket."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from support.echo import EchoControlPlane, EchoModel, echo_dataplane

from modelserver.app.frontends import grpc_frontend
from modelserver.core.datatype import Datatype
from modelserver.frontends.grpc.frontend import GrpcFrontend
from modelserver.planes.data import DataPlane
from modelserver.protocol.call import Method
from modelserver.protocol.limits import GrpcLimits


@pytest.fixture
def model() -> EchoModel:
    """`echo`: FP32, any length, version 1."""
    return EchoModel()


@pytest.fixture
def dataplane(model: EchoModel) -> DataPlane:
    """Over `model`, and one model for each datatype: `echo_FP32` and so on."""
    return echo_dataplane(model, *(EchoModel(f"echo_{datatype.value}", datatype) for datatype in Datatype))


@pytest.fixture
def controlplane() -> EchoControlPlane:
    return EchoControlPlane()


@pytest.fixture
def frontend(dataplane: DataPlane, controlplane: EchoControlPlane) -> GrpcFrontend:
    limits = GrpcLimits(max_tensors=8, max_stream_inflight=4)
    return grpc_frontend(
        dataplane,
        controlplane,  # type: ignore[arg-type]
        limits,
        health_watch_interval_s=0.01,
    )


@pytest.fixture
def methods(frontend: GrpcFrontend) -> Mapping[str, Method]:
    return frontend.methods
