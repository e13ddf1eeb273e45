"""The JSON documents of metadata, index and statistics, field by field as clients know them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelserver.execution.model import Model
    from modelserver.planes.data import ModelMetadata, ServerMetadata, TensorMetadata
    from modelserver.repository.state import IndexEntry
    from modelserver.telemetry.statistics_snapshot import DurationStat, ResponseStat, StatisticsSnapshot

Document = dict[str, Any]


def server_document(metadata: ServerMetadata) -> Document:
    return {"name": metadata.name, "version": metadata.version, "extensions": list(metadata.extensions)}


def model_document(metadata: ModelMetadata) -> Document:
    return {
        "name": metadata.name,
        "versions": list(metadata.versions),
        "platform": metadata.platform,
        "inputs": [_tensor(tensor) for tensor in metadata.inputs],
        "outputs": [_tensor(tensor) for tensor in metadata.outputs],
    }


def index_document(entries: Iterable[IndexEntry]) -> list[Document]:
    """One row per entry; unknown fields of a model that was never loaded are left out."""
    rows = []
    for entry in entries:
        row: Document = {"name": entry.name}
        if entry.version is not None:
            row["version"] = str(entry.version)
        if entry.state.value != "UNKNOWN":
            row["state"] = entry.state.value
        if entry.reason:
            row["reason"] = entry.reason
        if entry.repository:
            row["repository"] = entry.repository
        rows.append(row)
    return rows


def statistics_document(entries: Iterable[tuple[Model, StatisticsSnapshot]]) -> Document:
    return {"model_stats": [_statistics(model, snapshot) for model, snapshot in entries]}


def _statistics(model: Model, snapshot: StatisticsSnapshot) -> Document:
    return {
        "name": model.name,
        "version": str(model.version),
        "last_inference": snapshot.last_inference_ms,
        "inference_count": snapshot.inference_count,
        "execution_count": snapshot.execution_count,
        "inference_stats": {
            "success": _duration(snapshot.success),
            "fail": _duration(snapshot.fail),
            "queue": _duration(snapshot.queue),
            "compute_input": _duration(snapshot.compute_input),
            "compute_infer": _duration(snapshot.compute_infer),
            "compute_output": _duration(snapshot.compute_output),
            "cache_hit": _duration(snapshot.cache_hit),
            "cache_miss": _duration(snapshot.cache_miss),
        },
        "response_stats": {str(position): _response(stat) for position, stat in snapshot.response_stats.items()},
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": _duration(stat.compute_input),
                "compute_infer": _duration(stat.compute_infer),
                "compute_output": _duration(stat.compute_output),
            }
            for rows, stat in snapshot.batch_stats.items()
        ],
        "memory_usage": [
            {"type": usage.kind, "id": usage.id, "byte_size": usage.byte_size} for usage in model.memory_usage()
        ],
    }


def _response(stat: ResponseStat) -> Document:
    return {
        "compute_infer": _duration(stat.compute_infer),
        "compute_output": _duration(stat.compute_output),
        "success": _duration(stat.success),
        "fail": _duration(stat.fail),
        "empty_response": _duration(stat.empty_response),
        "cancel": _duration(stat.cancel),
    }


def _duration(stat: DurationStat) -> Document:
    return {"count": stat.count, "ns": stat.ns}


def _tensor(tensor: TensorMetadata) -> Document:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
