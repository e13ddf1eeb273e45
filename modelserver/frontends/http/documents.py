"""The JSON documents of metadata, index, statistics and the overview, field by field as clients know them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

import psutil

from modelserver.execution.model import Model
from modelserver.execution.pooled_instances import InstanceInfo
from modelserver.planes.authorized import AnyControlPlane, AnyDataPlane
from modelserver.planes.data import ModelMetadata, ServerMetadata, TensorMetadata
from modelserver.repository.state import IndexEntry
from modelserver.telemetry.host import HostGauges, process_memory
from modelserver.telemetry.statistics_snapshot import DurationStat, ResponseStat, StatisticsSnapshot

# `/v2/overview`: how the server and each of its model versions are doing, in one document for people's tools.

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


# The quantiles of latency that are reported.
_QUANTILES = (0.5, 0.9, 0.95, 0.99)
_HOST_INTERVAL_S = 1.0


class Overview:
    """Makes the document when asked. Durations are in milliseconds; counts are since load or the last reset."""

    def __init__(self, dataplane: AnyDataPlane, controlplane: AnyControlPlane) -> None:
        self._dataplane = dataplane
        self._controlplane = controlplane
        self._host = HostGauges(_HOST_INTERVAL_S)

    def document(self) -> Document:
        """`models` has a row for each row of the repository's index; only models that serve have measurements."""
        rows = self._dataplane.statistics()
        measured = {(model.name, model.version, model.namespace): (model, numbers) for model, numbers in rows}
        models = []
        for entry in self._controlplane.index():
            row: Document = {
                "name": entry.name,
                "version": "" if entry.version is None else str(entry.version),
                "state": entry.state.value,
                "reason": entry.reason,
            }
            found = None if entry.version is None else measured.get((entry.name, entry.version, entry.repository))
            models.append(row if found is None else {**row, **_model(*found)})
        bounds = rows[0][1].latency_histogram.bounds if rows else ()
        return {
            "server": self._server(),
            "host": self._machine(),
            "latency_bounds_ms": [round(bound * 1000, 6) for bound in bounds],
            "models": models,
        }

    def _server(self) -> Document:
        metadata = self._dataplane.server_metadata()
        process = psutil.Process()
        return {
            "name": metadata.name,
            "version": metadata.version,
            "pid": os.getpid(),
            "uptime_s": round(time.time() - process.create_time(), 3),
            "ready": self._dataplane.is_ready,
            "reasons": self._dataplane.unready_because(),
            "memory_bytes": process.memory_info().rss,
            "num_threads": process.num_threads(),
            "num_open_files": process.num_fds(),
        }

    def _machine(self) -> Document:
        reading = self._host.read()
        return {
            "cpu_utilization": round(reading.cpu_utilization, 4),
            "memory_total_bytes": reading.memory_total_bytes,
            "memory_used_bytes": reading.memory_used_bytes,
        }


def _model(model: Model, numbers: StatisticsSnapshot) -> Document:
    latency = numbers.latency_histogram
    executions, rows = numbers.execution_count, numbers.inference_count
    return {
        "backend": model.backend_name or model.config.platform,
        "load_duration_s": round(model.load_duration_s, 3),
        "queue_depth": numbers.pending,
        "inflight": numbers.inflight,
        "success": numbers.success.count,
        "fail": numbers.fail.count,
        "failures": {reason.value: count for reason, count in numbers.failures.items() if count},
        "inference_count": rows,
        "execution_count": executions,
        "mean_batch": round(rows / executions, 2) if executions else 0.0,
        "cache_hits": numbers.cache_hit.count,
        "last_inference": numbers.last_inference_ms,
        "latency": {
            "mean_ms": _mean_ms(numbers.success),
            **{f"p{share * 100:g}_ms": round(latency.quantile(share) * 1000, 4) for share in _QUANTILES},
            "counts": list(latency.counts),
        },
        "phases": {
            "queue_ms": _mean_ms(numbers.queue),
            "compute_input_ms": _mean_ms(numbers.compute_input),
            "compute_infer_ms": _mean_ms(numbers.compute_infer),
            "compute_output_ms": _mean_ms(numbers.compute_output),
        },
        "instances": [_instance(info) for info in model.instances()],
    }


def _instance(info: InstanceInfo) -> Document:
    document: Document = {
        "name": info.name,
        "kind": info.placement.kind.value,
        "device": info.placement.device_id,
        "is_busy": info.is_busy,
        "is_inline": info.is_inline,
        "execution_count": info.executions,
    }
    if info.pid is not None:
        document["pid"] = info.pid
        document["memory_bytes"] = sum(usage.byte_size for usage in process_memory((info.pid,)))
    return document


def _mean_ms(stat: DurationStat) -> float:
    return round(stat.ns / stat.count / 1e6, 4) if stat.count else 0.0
