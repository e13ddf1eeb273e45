"""The time limits of a connection: silent peers, slow bodies, slow readers, age. Checked once a second."""

from __future__ import annotations

import math
import random
from typing import Final

from modelserver.telemetry.wire_counts import Violation
from modelserver.wire.context import cut
from modelserver.wire.http2.abuse_limits import Keepalive, Pulse
from modelserver.wire.http2.closing import Closing
from modelserver.wire.http2.frame import MAX_31_BITS, ConnectionFault, ErrorCode, ping, too_much
from modelserver.wire.http2.preface import FIRST_SETTINGS
from modelserver.wire.http2.receiver import Receiver
from modelserver.wire.http2.stream import Connection, Http2Stream

_PING: Final = b"alive?\0\0"
# Ages vary by this much, so that clients of a restarted server do not all return at once.
_AGE_JITTER: Final = 0.1
# From this stream id on, a client is asked to reconnect before its ids run out.
_MAX_STREAM_ID: Final = MAX_31_BITS // 4 * 3


class _Progress:
    """How much of a body had arrived, and when; and the same at the start of the averaging period."""

    __slots__ = ("num_bytes", "period_bytes", "period_s", "since_s")

    def __init__(self, num_bytes: int, now_s: float) -> None:
        self.num_bytes = self.period_bytes = num_bytes
        self.since_s = self.period_s = now_s


class Timeouts:
    """The clocks of one connection."""

    __slots__ = (
        "_asleep_until_s",
        "_awaited",
        "_awaited_since_s",
        "_begun_s",
        "_bodies",
        "_closing",
        "_connection",
        "_full_since_s",
        "_idle_since_s",
        "_keepalive",
        "_max_age_s",
        "_num_opened",
        "_num_unsent",
        "_progress",
        "_receiver",
    )

    def __init__(self, connection: Connection, receiver: Receiver, closing: Closing, now_s: float) -> None:
        keepalive = connection.context.limits.keepalive
        self._connection = connection
        self._receiver = receiver
        self._closing = closing
        self._begun_s = now_s
        self._awaited = receiver.awaited
        self._awaited_since_s = now_s
        self._keepalive = Keepalive(keepalive, now_s)
        self._progress = connection.sender.progress
        self._bodies: dict[int, _Progress] = {}
        self._idle_since_s = now_s
        self._num_opened = 0
        # Since when the transport is full, and with how many bytes.
        self._full_since_s: float | None = None
        self._num_unsent = 0
        # Nothing is due until then without input: thousands of idle connections must cost next to nothing.
        self._asleep_until_s = now_s
        age_s = keepalive.max_age_s
        self._max_age_s = None if age_s is None else age_s * random.uniform(1 - _AGE_JITTER, 1 + _AGE_JITTER)  # noqa: S311

    def sweep(self, now_s: float) -> None:
        """Close the connection, or end its streams, if their time is up. Raises ConnectionFault to have it ended."""
        connection = self._connection
        if now_s < self._asleep_until_s and not connection.has_heard:
            return
        if self._closing.has_hung_up:
            self._check_transport(now_s)
            return
        self._check_head(now_s)
        self._check_pulse(now_s)
        self._check_transport(now_s)
        if connection.streams:
            self._check_bodies(now_s)
            self._check_readers(now_s)
        self._check_age(now_s)
        self._fall_asleep()

    def _check_head(self, now_s: float) -> None:
        """The preface, the first SETTINGS, and header blocks in several frames must be complete soon."""
        times = self._connection.context.limits.times
        awaited = self._receiver.awaited
        if awaited != self._awaited:
            self._awaited, self._awaited_since_s = awaited, now_s
        limit_s = times.first_settings_s if awaited == FIRST_SETTINGS else times.head_s
        if awaited is not None and now_s - self._awaited_since_s > limit_s:
            raise ConnectionFault(
                ErrorCode.PROTOCOL_ERROR, f"{awaited} did not come within {limit_s:g} s", Violation.SLOW_HEAD
            )

    def _check_pulse(self, now_s: float) -> None:
        connection = self._connection
        if connection.has_heard:
            connection.has_heard = False
            self._keepalive.heard(now_s)
        progress = connection.sender.progress
        has_sent, self._progress = progress != self._progress, progress
        pulse = self._keepalive.check(now_s, has_streams=bool(connection.streams), has_sent=has_sent)
        if pulse is Pulse.PING:
            connection.sender.frames.append(ping(_PING))
        elif pulse is Pulse.DEAD:
            raise too_much(Violation.NO_PING_ANSWER)

    def _check_transport(self, now_s: float) -> None:
        """Close a connection whose peer takes none of its waiting data."""
        connection = self._connection
        num_unsent = connection.transport.get_write_buffer_size()
        if not num_unsent or num_unsent < self._num_unsent or self._full_since_s is None:
            self._full_since_s = now_s if num_unsent else None
        elif now_s - self._full_since_s > connection.context.limits.times.slow_reader_s:
            connection.count(Violation.SLOW_READER)
            cut(connection.transport, connection.context)
        self._num_unsent = num_unsent

    def _check_bodies(self, now_s: float) -> None:
        """Give up stalled requests without a running handler."""
        connection, times = self._connection, self._connection.context.limits.times
        slow: list[Http2Stream] = []
        bodies: dict[int, _Progress] = {}
        for stream in connection.streams.values():
            if not stream.awaits_body:
                continue
            num_bytes = stream.num_received - self._receiver.num_missing(stream)
            progress = bodies[stream.id] = self._bodies.get(stream.id) or _Progress(num_bytes, now_s)
            if num_bytes != progress.num_bytes:
                progress.num_bytes, progress.since_s = num_bytes, now_s
            period_s = now_s - progress.period_s
            if now_s - progress.since_s > times.body_pause_s:
                slow.append(stream)
            elif period_s >= times.body_window_s:
                if num_bytes - progress.period_bytes < times.body_rate * period_s:
                    slow.append(stream)
                progress.period_bytes, progress.period_s = num_bytes, now_s
        self._bodies = bodies
        for stream in slow:
            connection.count(Violation.SLOW_BODY)
            stream.give_up(f"the request came too slowly: nothing for {times.body_pause_s:g} s, or too little")

    def _check_readers(self, now_s: float) -> None:
        """Give up answers that the client leaves us no window for."""
        connection, limit_s = self._connection, self._connection.context.limits.times.slow_reader_s
        if connection.sender.is_paused:
            return  # all streams are blocked: `_check_transport` handles that
        for stream in [stream for stream in connection.streams.values() if stream.outgoing is not None]:
            outgoing = stream.outgoing
            if outgoing is None or not outgoing.num_bytes:
                continue
            if outgoing.stuck_since_s is None:
                outgoing.stuck_since_s = now_s
            elif now_s - outgoing.stuck_since_s > limit_s:
                connection.count(Violation.SLOW_READER)
                connection.reset(stream, ErrorCode.CANCEL)

    def _check_age(self, now_s: float) -> None:
        """Say goodbye to connections that are old, idle, or at the end of their stream ids."""
        connection, limits = self._connection, self._connection.context.limits
        if connection.streams or connection.num_opened != self._num_opened:
            self._num_opened = connection.num_opened
            self._idle_since_s = now_s
        is_old = self._max_age_s is not None and now_s - self._begun_s > self._max_age_s
        idle_s = limits.times.http2_idle_s
        is_idle = idle_s > 0 and now_s - self._idle_since_s > idle_s
        if is_old or is_idle or connection.last_stream_id > _MAX_STREAM_ID:
            self._closing.announce(limits.keepalive.max_age_grace_s)

    def _fall_asleep(self) -> None:
        """If the connection is idle, wait for the earlier limit: idle time or age."""
        connection, limits = self._connection, self._connection.context.limits
        self._asleep_until_s = 0.0
        is_quiet = not connection.streams and self._awaited is None and not self._num_unsent
        if is_quiet and not self._closing.has_begun and not limits.keepalive.ping_without_calls:
            self._bodies.clear()
            idle_s, age_s = limits.times.http2_idle_s, self._max_age_s
            self._asleep_until_s = min(
                self._idle_since_s + idle_s if idle_s > 0 else math.inf,
                self._begun_s + age_s if age_s is not None else math.inf,
            )
