"""A model's traffic in gRPC's messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelserver.pb import grpc_service_pb2 as pb

if TYPE_CHECKING:
    from modelserver.repository.traffic import Traffic


def traffic_document(message: pb.ModelTraffic) -> dict[str, Any]:
    """The message's content in the form of the JSON."""
    document: dict[str, Any] = {
        "weights": dict(message.weights),
        "sticky_by": message.sticky_by,
        "shadows": dict(message.shadows),
    }
    if message.HasField("tolerance"):
        document["tolerance"] = message.tolerance
    return document


def traffic_reply(traffic: Traffic | None, shares: Mapping[int, float]) -> pb.RepositoryModelTrafficResponse:
    """The current traffic."""
    if traffic is None:
        return pb.RepositoryModelTrafficResponse()
    return pb.RepositoryModelTrafficResponse(
        traffic=pb.ModelTraffic(
            weights=dict(traffic.weights),
            sticky_by=traffic.sticky_by,
            shadows=dict(traffic.shadows),
            tolerance=traffic.tolerance,
        ),
        shares=dict(shares),
    )
