"""Limits of a connection: every size, count and time that bounds a peer of our own wire.

A limit that is reached ends the request or the connection with the reason, and counts in the metrics
(`telemetry.wire_counts`). Defaults are those of widely used servers, where they agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_KIB = 1024
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds; 0 means no limit where it says so."""

    # From the accept to the end of the first request's head, or of the HTTP/2 preface.
    head_s: float = 10.0
    # From the HTTP/2 preface to the first SETTINGS.
    first_settings_s: float = 2.0
    # Without a byte in the middle of a body.
    body_pause_s: float = 30.0
    # Over which a body must bring `body_rate` bytes a second on average.
    body_window_s: float = 60.0
    body_rate: int = 1024
    # A peer that takes none of its waiting data.
    slow_reader_s: float = 60.0
    # An idle HTTP/1.1 connection; longer than the usual idle timeout of proxies, so that the proxies close.
    http1_idle_s: float = 75.0
    # An idle HTTP/2 connection; 0: no limit.
    http2_idle_s: float = 3600.0
    # After the last answer of a closing connection, for the peer to close first.
    linger_s: float = 1.0
    # Between two comments that keep a silent event stream open.
    sse_comment_s: float = 15.0


@dataclass(frozen=True, slots=True)
class HeadLimits:
    """The head of a request."""

    max_target_bytes: int = 8 * _KIB
    max_http1_bytes: int = 32 * _KIB
    max_http1_fields: int = 100
    # HTTP/2: sum of name + value + 32 of each field (RFC 9113, 6.5.2).
    max_http2_list_bytes: int = 16 * _KIB
    max_continuations: int = 8
    max_header_block_bytes: int = 64 * _KIB


@dataclass(frozen=True, slots=True)
class Http2Limits:
    """The settings that we announce, and the abuse that we tolerate before a peer is told to calm down."""

    max_concurrent_streams: int = 1000
    initial_window_bytes: int = _MIB
    connection_window_bytes: int = 64 * _MIB
    max_frame_bytes: int = _MIB
    # Resets of unfinished streams, theirs or ours: a burst, then a number per second.
    resets_burst: int = 200
    resets_per_s: int = 100
    # Frames that do nothing: PRIORITY, unknown ones, tiny DATA, needless WINDOW_UPDATEs.
    glitches_burst: int = 2000
    glitches_per_s: int = 500
    # Answers to SETTINGS and PING that wait to be sent.
    max_control_frames: int = 1000
    max_settings: int = 32
    # New streams of one connection in one turn of the loop; further ones wait for the next turn.
    max_new_streams_per_turn: int = 128


@dataclass(frozen=True, slots=True)
class KeepaliveLimits:
    """gRPC's rules for pings and for the age of connections; seconds. None: no limit."""

    ping_after_s: float = 7200.0
    ping_timeout_s: float = 20.0
    ping_without_calls: bool = False
    min_ping_interval_s: float = 300.0
    max_ping_strikes: int = 2
    # Of ours, without a frame of data or headers between them; 0: no limit.
    max_pings_without_data: int = 2
    max_age_s: float | None = None
    max_age_grace_s: float | None = None


@dataclass(frozen=True, slots=True)
class WireLimits:
    """All limits of a port."""

    max_connections: int = 10_000
    # HTTP bodies and gRPC messages, as received and when decompressed.
    max_body_bytes: int = 64 * _MIB
    max_message_bytes: int = (1 << 31) - 1
    # Bytes of requests in assembly, in the process, beyond the first MiB of each.
    max_assembly_bytes: int = 256 * _MIB
    # Pipelined HTTP/1.1 requests that wait for their turn before the connection is read no further.
    max_pipelined: int = 16
    # Bytes in a transport's buffer before we stop producing more.
    write_buffer_bytes: int = _MIB
    # The same while an HTTP/1.1 answer is sent piece by piece, as it is made.
    pieces_buffer_bytes: int = 256 * _KIB
    # Bytes queued for one connection before it is read no further.
    max_queued_bytes: int = 64 * _MIB
    times: TimeLimits = field(default_factory=TimeLimits)
    head: HeadLimits = field(default_factory=HeadLimits)
    http2: Http2Limits = field(default_factory=Http2Limits)
    keepalive: KeepaliveLimits = field(default_factory=KeepaliveLimits)
    # "none", "low", "medium" or "high": how hard gRPC answers are compressed when the client accepts it.
    grpc_compression: str = "none"
    # The largest share of the loop's time for polling whether a client that was just answered sends again; 0: none.
    busy_poll_percent: int = 0
    # Whether heads and header blocks that repeat are recognised by their bytes (`core/recognition.py`).
    recognizes: bool = True


class Progress:
    """Watches a count of bytes that must grow: without a pause of `pause_s`, and at a rate over a window.

    The clock starts, and starts again by `restart`, at the first `check`.
    """

    __slots__ = ("_count", "_moved_s", "_window_count", "_window_s")

    def __init__(self) -> None:
        self._count = self._window_count = 0
        self._moved_s: float | None = None
        self._window_s = 0.0

    def restart(self) -> None:
        """Start measuring again; earlier pauses no longer count."""
        self._moved_s = None

    def paused_s(self, now_s: float, count: int) -> float:
        """For how long `count` has not grown."""
        if self._moved_s is None:
            self._window_s, self._window_count = now_s, count
            self._moved_s = now_s
        elif count != self._count:
            self._moved_s = now_s
        self._count = count
        return now_s - self._moved_s

    def is_too_slow(self, now_s: float, count: int, times: TimeLimits) -> bool:
        """Whether a body of which `count` bytes have come pauses for too long, or trickles."""
        if self.paused_s(now_s, count) > times.body_pause_s:
            return True
        if now_s - self._window_s < times.body_window_s:
            return False
        is_slow = count - self._window_count < times.body_rate * (now_s - self._window_s)
        self._window_s, self._window_count = now_s, count
        return is_slow
