"""The work of a load process: the server's address, the requests and the load. Sent as msgpack."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from modelserver.client.address import Address

DEFAULT_SEED = 0


class Transport(StrEnum):
    """How requests travel."""

    HTTP = "http"
    GRPC = "grpc"
    # ModelStreamInfer.
    STREAM = "stream"


@dataclass(frozen=True, slots=True)
class Template:
    """One request, encoded: an HTTP head and body, or a gRPC message without its prefix.

    `hole` is where an HTTP body has blanks for the parameters of a sequence, -1 if it has none.
    `expected` holds the bytes of outputs that are to be checked.
    """

    content: bytes
    hole: int = -1
    expected: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Ids go from `first_id` up to `end_id` (excluded; None for no end), and begin again."""

    first_id: int = 1
    end_id: int | None = None
    # None: as long as the data of the sequence.
    length: int | None = 20
    # Lengths vary by as many percent in both directions.
    variation: float = 20.0


@dataclass(frozen=True, slots=True)
class Work:
    """The requests of a run. `streams` holds lists of templates; without sequences they are sent in turn."""

    transport: Transport
    address: Address
    streams: tuple[tuple[Template, ...], ...]
    # Of gRPC: the fields of every request's head.
    fields: tuple[tuple[bytes, bytes], ...] = ()
    output_names: tuple[str, ...] = ()
    is_decoupled: bool = False
    algorithm: str = "none"
    frame_bytes: int = 16384
    lanes_per_connection: int = 6
    sequences: Sequences | None = None
    seed: int = DEFAULT_SEED


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoad:
    """`concurrency` requests in flight all the time; with `num_requests`, until that many are answered."""

    concurrency: int
    num_requests: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoad:
    """Requests at given times from `start_ns` on, regardless of the server.

    `intervals_ns` is repeated for ever; without it the times follow from `rate` (per second) and `is_poisson`.
    """

    rate: float
    start_ns: int
    is_poisson: bool = False
    intervals_ns: tuple[int, ...] = ()
    num_lanes: int = 16
    max_lanes: int = 1024
    num_requests: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodicLoad:
    """`first` requests at once, `step` more whenever the last ones have `period` responses each, `total` in all."""

    first: int
    total: int
    step: int
    period: int


Load = ClosedLoad | OpenLoad | PeriodicLoad


@dataclass(frozen=True, slots=True)
class Share:
    """Which of several load processes one is; each takes every `num_workers`-th of what is numbered."""

    index: int
    num_workers: int

    def of(self, total: int) -> int:
        """This process's part of `total` things."""
        return total // self.num_workers + (self.index < total % self.num_workers)
