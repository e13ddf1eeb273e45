"""Files and batches as they are kept and as clients see them."""

from __future__ import annotations

import enum
import secrets
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from prometheus_client.core import Metric

Document = dict[str, Any]


class BatchStatus(enum.StrEnum):
    """The states of a batch.

    validating -> failed | in_progress -> finalizing -> completed | expired, and from the first two by a client's
    request -> cancelling -> cancelled.
    """

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (self.FAILED, self.COMPLETED, self.EXPIRED, self.CANCELLED)


def new_id(prefix: str) -> str:
    """A new id of a file, a batch or a row."""
    return prefix + secrets.token_hex(16)


@dataclass(kw_only=True)
class FileRecord:
    """One file. Times are in seconds since 1970; `owner` is the name of its API key, empty without keys."""

    id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    created_s: int
    expires_s: int | None = None

    @classmethod
    def of(cls, kept: Document) -> FileRecord:
        """As `asdict` keeps it. Raises TypeError for anything else."""
        return cls(**kept)

    def document(self) -> Document:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass
class BatchUsage:
    """Tokens of all answers of a batch."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, usage: Document) -> None:
        """Add the `usage` of one answer, of a chat, a completion, a response or an embedding."""
        self.input_tokens += usage.get("prompt_tokens") or usage.get("input_tokens") or 0
        self.output_tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0
        inputs = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        outputs = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
        self.cached_tokens += inputs.get("cached_tokens") or 0
        self.reasoning_tokens += outputs.get("reasoning_tokens") or 0

    def document(self) -> Document:
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


@dataclass(kw_only=True)
class BatchRecord:
    """One batch. `times` has the moment of each state that it was in.

    `final` is the state that it ends in, once all its rows are written: from then on only files are published.
    """

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    metadata: dict[str, str] | None
    created_s: int
    expires_s: int
    output_lifetime_s: int
    status: BatchStatus = BatchStatus.VALIDATING
    final: BatchStatus | None = None
    model: str | None = None
    times: dict[str, int] = field(default_factory=dict)
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[Document] = field(default_factory=list)
    num_total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    usage: BatchUsage = field(default_factory=BatchUsage)

    @classmethod
    def of(cls, kept: Document) -> BatchRecord:
        """As `asdict` keeps it. Raises TypeError or ValueError for anything else."""
        final = kept["final"]
        return cls(
            **{
                **kept,
                "status": BatchStatus(kept["status"]),
                "final": None if final is None else BatchStatus(final),
                "usage": BatchUsage(**kept["usage"]),
            }
        )

    def enter(self, status: BatchStatus, now_s: int) -> None:
        """Change the state."""
        self.status = status
        self.times[f"{status}_at"] = now_s

    def document(self) -> Document:
        moments = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id if self.status.is_final else None,
            "error_file_id": self.error_file_id if self.status.is_final else None,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            **{f"{moment}_at": self.times.get(f"{moment}_at") for moment in moments},
            "request_counts": {"total": self.num_total, "completed": self.num_completed, "failed": self.num_failed},
            "usage": self.usage.document(),
            "metadata": self.metadata,
        }


@dataclass
class RowCounts:
    """Rows that were written since the server started; their rate is how fast batches go."""

    num_completed: int = 0
    num_failed: int = 0


def batch_families(records: Collection[BatchRecord], written: RowCounts, num_running: int) -> list[Metric]:
    """Batches by state, requests that run or wait, and requests that have ended."""
    batches = Metric("modelserver_batches", "Batches of OpenAI's API by status, until they are removed", "gauge")
    counts = Counter(record.status for record in records)
    for status in BatchStatus:
        batches.add_sample(batches.name, {"status": status.value}, counts[status])
    left = Metric("modelserver_batch_requests_left", "Requests of batches in progress that have no row yet", "gauge")
    num_left = sum(
        max(0, record.num_total - record.num_completed - record.num_failed)
        for record in records
        if record.status is BatchStatus.IN_PROGRESS
    )
    left.add_sample(left.name, {}, num_left)
    running = Metric("modelserver_batch_requests_running", "Requests of batches that the server works on", "gauge")
    running.add_sample(running.name, {}, num_running)
    rows = Metric(
        "modelserver_batch_requests_ended",
        "Requests of batches that got their row since the server started, by result",
        "counter",
    )
    for result, number in (("completed", written.num_completed), ("failed", written.num_failed)):
        rows.add_sample(f"{rows.name}_total", {"result": result}, number)
    return [batches, left, running, rows]


def kept(record: FileRecord | BatchRecord) -> Document:
    """What is written to the disk."""
    return asdict(record)
