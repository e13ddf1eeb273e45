"""`modelserver ps`, and the load of each model version between two overviews of a server, which `top` shows, too."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from modelserver.cli.output import AsJson, Url, print_json, print_line, print_table
from modelserver.client.server_client import DEFAULT_URL, ServerClient
from modelserver.telemetry.histogram import HistogramSnapshot

Document = Mapping[str, Any]
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class ModelUsage:
    """A row. Latencies are in milliseconds and cover successful requests; None if nothing was measured.

    `rate` and `failure_rate` are requests per second between the overviews, None if there was only one.
    `memory_bytes` is the memory of the model's own processes.
    """

    name: str
    version: str
    state: str
    reason: str
    backend: str
    devices: str
    num_instances: int
    num_busy: int
    memory_bytes: int | None
    queue_depth: int
    inflight: int
    num_requests: int
    num_failures: int
    rate: float | None
    failure_rate: float | None
    mean_batch: float | None
    p50_ms: float | None
    p99_ms: float | None
    last_inference_ms: int


def model_usages(now: Document, before: Document | None = None, elapsed_s: float = 0.0) -> list[ModelUsage]:
    """A row for each row of the overview `now`; the numbers cover the time since `before`, or since the load."""
    bounds = tuple(now["latency_bounds_ms"])
    old = {} if before is None else {_key(row): row for row in before["models"]}
    return [_usage(row, old.get(_key(row)), elapsed_s if before is not None else 0.0, bounds) for row in now["models"]]


def _key(row: Document) -> tuple[str, str]:
    return row["name"], row["version"]


def _usage(row: Document, before: Document | None, elapsed_s: float, bounds: Sequence[float]) -> ModelUsage:
    instances = row.get("instances", [])
    gained = _Gain(row, before)
    executions = gained.of("execution_count")
    latencies = gained.latencies(bounds)
    memory = [instance["memory_bytes"] for instance in instances if "memory_bytes" in instance]
    return ModelUsage(
        name=row["name"],
        version=row["version"],
        state=row["state"],
        reason=row["reason"],
        backend=row.get("backend", ""),
        devices=_devices(instances),
        num_instances=len(instances),
        num_busy=sum(instance["is_busy"] for instance in instances),
        memory_bytes=sum(memory) if memory else None,
        queue_depth=row.get("queue_depth", 0),
        inflight=row.get("inflight", 0),
        num_requests=row.get("success", 0) + row.get("fail", 0),
        num_failures=row.get("fail", 0),
        rate=(gained.of("success") + gained.of("fail")) / elapsed_s if elapsed_s else None,
        failure_rate=gained.of("fail") / elapsed_s if elapsed_s else None,
        mean_batch=gained.of("inference_count") / executions if executions else None,
        p50_ms=latencies.quantile(0.5) if latencies.count else None,
        p99_ms=latencies.quantile(0.99) if latencies.count else None,
        last_inference_ms=row.get("last_inference", 0),
    )


class _Gain:
    """The increase of a counter between two rows of a version. A smaller value means a restart: all of it counts."""

    def __init__(self, row: Document, before: Document | None) -> None:
        began_anew = before is None or before.get("success", 0) > row.get("success", 0)
        self._row = row
        self._before: Document = {} if began_anew or before is None else before

    def of(self, key: str) -> int:
        return max(0, int(self._row.get(key, 0)) - int(self._before.get(key, 0)))

    def latencies(self, bounds: Sequence[float]) -> HistogramSnapshot:
        counts = self._row.get("latency", {}).get("counts", [])
        old = self._before.get("latency", {}).get("counts") or [0] * len(counts)
        return HistogramSnapshot(tuple(bounds), tuple(now - then for now, then in zip(counts, old, strict=True)), 0.0)


def _devices(instances: Sequence[Document]) -> str:
    """`cpu`, `model`, or `gpu:0,gpu:1`."""
    names = set()
    for instance in instances:
        kind = instance["kind"].removeprefix("KIND_").lower()
        names.add(f"gpu:{instance['device']}" if kind == "gpu" else kind)
    return ",".join(sorted(names))


def bytes_text(size: float | None) -> str:
    """A size for people, such as 1.5 GiB."""
    if size is None:
        return "-"
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if size >= 100 or unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def number_text(value: float | None) -> str:
    """A number for people: three significant digits, `-` for none."""
    if value is None:
        return "-"
    if value >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def duration_text(seconds: float) -> str:
    """A time for people, such as 3h 20m."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (rest, "s")]
    first = next((index for index, (value, _) in enumerate(parts) if value), len(parts) - 1)
    return " ".join(f"{value}{unit}" for value, unit in parts[first : first + 2])


COLUMNS = (
    "model", "version", "state", "backend", "device", "instances", "memory", "queue", "in flight", "requests",
    "failed", "req/s", "batch", "p50 ms", "p99 ms", "last used",
)  # fmt: skip


def usage_cells(usage: ModelUsage, now_s: float) -> tuple[str, ...]:
    """The row's cells under `COLUMNS`; `now_s` is Unix time."""
    idle_s = max(0.0, now_s - usage.last_inference_ms / 1000)
    return (
        usage.name,
        usage.version,
        usage.state,
        usage.backend,
        usage.devices,
        f"{usage.num_busy}/{usage.num_instances}" if usage.num_instances else "-",
        bytes_text(usage.memory_bytes),
        str(usage.queue_depth),
        str(usage.inflight),
        str(usage.num_requests),
        str(usage.num_failures),
        number_text(usage.rate),
        number_text(usage.mean_batch),
        number_text(usage.p50_ms),
        number_text(usage.p99_ms),
        f"{duration_text(idle_s)} ago" if usage.last_inference_ms else "never",
    )


def ps(
    url: Url = DEFAULT_URL,
    sample_s: Annotated[
        float,
        typer.Option(
            "--sample", min=0.0, help="Seconds over which requests per second are measured; 0: do not measure."
        ),
    ] = 0.5,
    is_all: Annotated[bool, typer.Option("--all", "-a", help="Include models that do not serve.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the models that serve: instances, queue, requests per second, latency, memory."""
    client = ServerClient(url)
    before, elapsed_s = None, 0.0
    if sample_s:
        before, since = client.overview(), time.monotonic()
        time.sleep(sample_s)
        elapsed_s = time.monotonic() - since
    document = client.overview()
    rates = {(row.name, row.version): row.rate for row in model_usages(document, before, elapsed_s)}
    # Latencies cover the time since the load: half a second is too short a sample.
    usages = [row for row in model_usages(document) if is_all or row.state == "READY"]
    if as_json:
        models = [_document(row, rates[row.name, row.version]) for row in usages]
        print_json({"server": document["server"], "host": document["host"], "models": models})
        return
    now_s = time.time()
    at_rate = COLUMNS.index("req/s")
    cells = [list(usage_cells(row, now_s)) for row in usages]
    for row, line in zip(usages, cells, strict=True):
        rate = rates[row.name, row.version]
        line[at_rate] = "-" if rate is None else f"{rate:.0f}"
    print_table(COLUMNS, cells)
    server = document["server"]
    print_line("")
    print_line(
        f"{url}: {'ready' if server['ready'] else 'not ready'}, up {duration_text(server['uptime_s'])}, "
        f"server {bytes_text(server['memory_bytes'])}, {server['num_threads']} threads, "
        f"{server['num_open_files']} open files"
    )
    for reason in server["reasons"]:
        print_line(f"  {reason}")


def _document(usage: ModelUsage, rate: float | None) -> dict[str, Any]:
    document = {**asdict(usage), "rate": rate}
    del document["failure_rate"]  # not measured without a sample
    return document
