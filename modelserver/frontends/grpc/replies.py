"""Messages that answer everything but inference, built from the planes' reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from modelserver.pb import grpc_service_pb2 as pb

if TYPE_CHECKING:
    from modelserver.execution.model import Model
    from modelserver.planes.data import ModelMetadata, ServerMetadata, TensorMetadata
    from modelserver.repository.state import IndexEntry
    from modelserver.repository.traffic import Traffic
    from modelserver.telemetry.statistics_snapshot import DurationStat, ResponseStat, StatisticsSnapshot


def server_metadata(metadata: ServerMetadata) -> pb.ServerMetadataResponse:
    return pb.ServerMetadataResponse(name=metadata.name, version=metadata.version, extensions=metadata.extensions)


def model_metadata(metadata: ModelMetadata) -> pb.ModelMetadataResponse:
    return pb.ModelMetadataResponse(
        name=metadata.name,
        versions=metadata.versions,
        platform=metadata.platform,
        inputs=_tensors(metadata.inputs),
        outputs=_tensors(metadata.outputs),
    )


def _tensors(tensors: Iterable[TensorMetadata]) -> list[pb.ModelMetadataResponse.TensorMetadata]:
    return [
        pb.ModelMetadataResponse.TensorMetadata(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        for tensor in tensors
    ]


def statistics(models: Iterable[tuple[Model, StatisticsSnapshot]]) -> pb.ModelStatisticsResponse:
    return pb.ModelStatisticsResponse(model_stats=[_model_statistics(model, snapshot) for model, snapshot in models])


def _model_statistics(model: Model, snapshot: StatisticsSnapshot) -> pb.ModelStatistics:
    return pb.ModelStatistics(
        name=model.name,
        version=str(model.version),
        last_inference=snapshot.last_inference_ms,
        inference_count=snapshot.inference_count,
        execution_count=snapshot.execution_count,
        inference_stats=pb.InferStatistics(
            success=_duration(snapshot.success),
            fail=_duration(snapshot.fail),
            queue=_duration(snapshot.queue),
            compute_input=_duration(snapshot.compute_input),
            compute_infer=_duration(snapshot.compute_infer),
            compute_output=_duration(snapshot.compute_output),
            cache_hit=_duration(snapshot.cache_hit),
            cache_miss=_duration(snapshot.cache_miss),
        ),
        batch_stats=[
            pb.InferBatchStatistics(
                batch_size=rows,
                compute_input=_duration(stat.compute_input),
                compute_infer=_duration(stat.compute_infer),
                compute_output=_duration(stat.compute_output),
            )
            for rows, stat in sorted(snapshot.batch_stats.items())
        ],
        memory_usage=[
            pb.MemoryUsage(type=usage.kind, id=usage.id, byte_size=usage.byte_size) for usage in model.memory_usage()
        ],
        response_stats={str(position): _response(stat) for position, stat in snapshot.response_stats.items()},
    )


def _response(stat: ResponseStat) -> pb.InferResponseStatistics:
    return pb.InferResponseStatistics(
        compute_infer=_duration(stat.compute_infer),
        compute_output=_duration(stat.compute_output),
        success=_duration(stat.success),
        fail=_duration(stat.fail),
        empty_response=_duration(stat.empty_response),
        cancel=_duration(stat.cancel),
    )


def _duration(stat: DurationStat) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=stat.count, ns=stat.ns)


def repository_index(entries: Iterable[IndexEntry]) -> pb.RepositoryIndexResponse:
    """Unknown versions and states are left out, as in Triton."""
    return pb.RepositoryIndexResponse(
        models=[
            pb.RepositoryIndexResponse.ModelIndex(
                name=entry.name,
                version="" if entry.version is None else str(entry.version),
                state="" if entry.state.value == "UNKNOWN" else entry.state.value,
                reason=entry.reason,
                repository=entry.repository,
            )
            for entry in entries
        ]
    )


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
