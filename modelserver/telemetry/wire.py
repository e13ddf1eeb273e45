"""What our own wire counts: connections, streams, and peers that went over a limit."""

from __future__ import annotations

import enum
from collections import Counter


class Protocol(enum.Enum):
    """What a connection speaks; the values are the `protocol` labels of the metrics."""

    HTTP1 = "http1"
    HTTP2 = "http2"
    UNKNOWN = "unknown"  # nothing that tells it has arrived yet


class Violation(enum.Enum):
    """A limit that a peer went over, or a rule that it broke.

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


class WireCounts:
    """Counts since the start of the server. Event loop thread only."""

    def __init__(self) -> None:
        self.connections_opened: Counter[Protocol] = Counter()
        self.connections_open: Counter[Protocol] = Counter()
        # HTTP/2 streams that are open now.
        self.open_streams = 0
        self.violations: Counter[tuple[Protocol, Violation]] = Counter()

    def opened(self, protocol: Protocol) -> None:
        """A connection speaks `protocol`."""
        self.connections_opened[protocol] += 1
        self.connections_open[protocol] += 1

    def closed(self, protocol: Protocol) -> None:
        """A connection that was counted by `opened` is gone."""
        self.connections_open[protocol] -= 1

    def violated(self, protocol: Protocol, violation: Violation) -> None:
        """A peer went over a limit: its request or its connection was ended."""
        self.violations[protocol, violation] += 1
