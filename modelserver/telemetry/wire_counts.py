"""Counters of our own wire: connections, streams, and peers that exceeded a limit."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric

from modelserver.telemetry.file_reloads import FileReloads


class Protocol(enum.Enum):
    """The protocol of a connection; the values are the `protocol` labels of the metrics."""

    HTTP1 = "http1"
    HTTP2 = "http2"
    UNKNOWN = "unknown"  # not enough bytes have arrived to detect it


class Violation(enum.Enum):
    """A limit that a peer exceeded, or a rule that it broke.

    The values are the `reason` labels, and the debug data of HTTP/2's GOAWAY."""

    TOO_MANY_CONNECTIONS = "too_many_connections"
    BAD_PREFACE = "bad_preface"
    TLS = "tls_handshake"
    PROTOCOL = "protocol_error"
    FRAME_SIZE = "frame_size_error"
    FLOW_CONTROL = "flow_control_error"
    COMPRESSION = "compression_error"
    SMUGGLING = "ambiguous_framing"
    HEAD_TOO_LARGE = "head_too_large"
    BODY_TOO_LARGE = "body_too_large"
    TOO_MANY_CONTINUATIONS = "too_many_continuations"
    TOO_MANY_RESETS = "too_many_resets"
    TOO_MANY_GLITCHES = "too_many_glitches"
    TOO_MANY_CONTROL_FRAMES = "too_many_control_frames"
    TOO_MANY_SETTINGS = "too_many_settings"
    TOO_MANY_PINGS = "too_many_pings"
    TOO_MANY_STREAMS = "too_many_streams"
    SLOW_HEAD = "slow_head"
    SLOW_BODY = "slow_body"
    SLOW_READER = "slow_reader"
    NO_PING_ANSWER = "no_ping_answer"
    ASSEMBLY_BUDGET = "assembly_budget"


# The reasons that are possible in a protocol, so that their counters start at 0.
_POSSIBLE = {
    Protocol.UNKNOWN: (Violation.TOO_MANY_CONNECTIONS, Violation.BAD_PREFACE, Violation.TLS, Violation.SLOW_HEAD),
    Protocol.HTTP1: (
        Violation.PROTOCOL,
        Violation.SMUGGLING,
        Violation.HEAD_TOO_LARGE,
        Violation.BODY_TOO_LARGE,
        Violation.SLOW_HEAD,
        Violation.SLOW_BODY,
        Violation.SLOW_READER,
        Violation.ASSEMBLY_BUDGET,
    ),
    Protocol.HTTP2: (
        Violation.PROTOCOL,
        Violation.FRAME_SIZE,
        Violation.FLOW_CONTROL,
        Violation.COMPRESSION,
        Violation.HEAD_TOO_LARGE,
        Violation.BODY_TOO_LARGE,
        Violation.TOO_MANY_CONTINUATIONS,
        Violation.TOO_MANY_RESETS,
        Violation.TOO_MANY_GLITCHES,
        Violation.TOO_MANY_CONTROL_FRAMES,
        Violation.TOO_MANY_SETTINGS,
        Violation.TOO_MANY_PINGS,
        Violation.TOO_MANY_STREAMS,
        Violation.SLOW_HEAD,
        Violation.SLOW_BODY,
        Violation.SLOW_READER,
        Violation.NO_PING_ANSWER,
        Violation.ASSEMBLY_BUDGET,
    ),
}


class WireCounts:
    """Counts since the start of the server. Event loop thread only."""

    def __init__(self) -> None:
        self.connections_opened: Counter[Protocol] = Counter()
        self.connections_open: Counter[Protocol] = Counter()
        # HTTP/2 streams that are open now.
        self.open_streams = 0
        self.violations: Counter[tuple[Protocol, Violation]] = Counter()
        # Of certificates and their keys; other files of the server may be counted there, too.
        self.reloads = FileReloads()

    def opened(self, protocol: Protocol) -> None:
        """Count a connection that speaks `protocol`."""
        self.connections_opened[protocol] += 1
        self.connections_open[protocol] += 1

    def closed(self, protocol: Protocol) -> None:
        """Count the end of a connection that `opened` has counted."""
        self.connections_open[protocol] -= 1

    def violated(self, protocol: Protocol, violation: Violation) -> None:
        """Count a peer that exceeded a limit, so its request or connection was ended."""
        self.violations[protocol, violation] += 1


@dataclass(frozen=True, slots=True)
class FrontGauges:
    """The state of one of several wire processes; a restarting process has no `pid` or does not serve yet."""

    name: str
    pid: int | None
    is_serving: bool
    num_connections: int
    num_inflight: int
    num_restarts: int


def front_families(fronts: Sequence[FrontGauges]) -> list[Metric]:
    """The families of `--wire-processes`, by process; without processes there are none."""
    if not fronts:
        return []
    up = Metric("modelserver_wire_process_up", "1 if the wire process serves, 0 while it is started again", "gauge")
    connections = Metric("modelserver_wire_process_connections", "Connections that the wire process has", "gauge")
    inflight = Metric(
        "modelserver_wire_process_inflight_requests", "Inference requests of the process not yet answered", "gauge"
    )
    restarts = Metric("modelserver_wire_process_restarts", "How often the wire process was started again", "counter")
    for front in fronts:
        labels = {"process": front.name}
        up.add_sample(up.name, labels, int(front.is_serving))
        connections.add_sample(connections.name, labels, front.num_connections)
        inflight.add_sample(inflight.name, labels, front.num_inflight)
        restarts.add_sample(f"{restarts.name}_total", labels, front.num_restarts)
    return [up, connections, inflight, restarts]


def wire_families(counts: WireCounts) -> list[Metric]:
    """The families of our own wire, over all ports of the server."""
    opened = Metric("modelserver_connections", "Connections since start, by what they spoke", "counter")
    is_open = Metric("modelserver_open_connections", "Connections that are open, by what they speak", "gauge")
    for protocol in Protocol:
        labels = {"protocol": protocol.value}
        opened.add_sample(f"{opened.name}_total", labels, counts.connections_opened[protocol])
        is_open.add_sample(is_open.name, labels, counts.connections_open[protocol])
    streams = Metric("modelserver_open_streams", "HTTP/2 streams that are open: requests in progress", "gauge")
    streams.add_sample(streams.name, {}, counts.open_streams)
    violations = Metric(
        "modelserver_peer_violations",
        "Requests and connections that were ended because a peer broke a rule or went over a limit",
        "counter",
    )
    possible = {(protocol, violation): 0 for protocol, kinds in _POSSIBLE.items() for violation in kinds}
    for (protocol, violation), count in {**possible, **counts.violations}.items():
        labels = {"protocol": protocol.value, "reason": violation.value}
        violations.add_sample(f"{violations.name}_total", labels, count)
    return [opened, is_open, streams, violations]
