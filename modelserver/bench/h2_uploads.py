"""Data of requests that waits for the peer's windows (RFC 9113, 5.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from modelserver.bench.h2_outgoing import JOIN_BYTES, Outgoing
from modelserver.wire.http2.frame import DATA, DEFAULT_FRAME_BYTES, DEFAULT_WINDOW_BYTES, END_STREAM, frame
from modelserver.wire.http2.settings import INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE


class _Upload:
    """What of one stream's data is not sent."""

    __slots__ = ("ends", "parts", "window")

    def __init__(self, window: int) -> None:
        self.window = window
        self.parts: deque[memoryview] = deque()
        self.ends = False


class Uploads:
    """The windows of a connection, and the streams that have more to send.

    Data that ends its stream and fits all windows needs no upload: its sender takes it off `window` itself.
    """

    __slots__ = ("_outgoing", "_uploads", "initial_window", "max_frame", "window")

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing
        self._uploads: dict[int, _Upload] = {}
        self.window = DEFAULT_WINDOW_BYTES
        self.initial_window = DEFAULT_WINDOW_BYTES
        self.max_frame = DEFAULT_FRAME_BYTES

    def begin(self, stream_id: int, data: bytes, *, ends: bool) -> None:
        """The first data of a stream."""
        self._uploads[stream_id] = _Upload(self.initial_window)
        self.add(stream_id, data, ends=ends)

    def add(self, stream_id: int, data: bytes, *, ends: bool) -> None:
        """More data of a stream that was begun without `ends`."""
        upload = self._uploads[stream_id]
        upload.parts.append(memoryview(data))
        upload.ends = ends
        self._pump(stream_id, upload)

    def drop(self, stream_id: int) -> None:
        """The stream is over."""
        self._uploads.pop(stream_id, None)

    def end_all(self) -> None:
        """End the streams of which nothing waits."""
        for stream_id in [stream_id for stream_id, upload in self._uploads.items() if not upload.parts]:
            self._outgoing.parts.append(frame(DATA, END_STREAM, stream_id, b""))
            del self._uploads[stream_id]

    def clear(self) -> None:
        """All streams are over."""
        self._uploads.clear()

    def apply(self, settings: Sequence[tuple[int, int]]) -> None:
        """What the peer's SETTINGS say of windows and frames; another initial window moves those of all streams."""
        for key, value in settings:
            if key == MAX_FRAME_SIZE:
                self.max_frame = value
            elif key == INITIAL_WINDOW_SIZE:
                for upload in self._uploads.values():
                    upload.window += value - self.initial_window
                self.initial_window = value
        self._pump_all()

    def widen(self, stream_id: int, increment: int) -> None:
        """The peer takes so much more, on a stream, or on the connection (stream 0)."""
        if not stream_id:
            self.window += increment
            self._pump_all()
        elif (upload := self._uploads.get(stream_id)) is not None:
            upload.window += increment
            self._pump(stream_id, upload)

    def _pump_all(self) -> None:
        for stream_id, upload in list(self._uploads.items()):
            if self.window <= 0:
                return
            self._pump(stream_id, upload)

    def _pump(self, stream_id: int, upload: _Upload) -> None:
        """Send what the windows allow."""
        raw_id = stream_id.to_bytes(4, "big")
        outgoing = self._outgoing
        while upload.parts:
            part = upload.parts[0]
            size = min(len(part), self.max_frame, self.window, upload.window)
            if size <= 0 and len(part):
                return
            self.window -= size
            upload.window -= size
            if size == len(part):
                upload.parts.popleft()
            else:
                upload.parts[0] = part[size:]
            outgoing.has_large = outgoing.has_large or size >= JOIN_BYTES
            is_end = upload.ends and not upload.parts
            outgoing.parts += ((size << 16 | (END_STREAM if is_end else 0)).to_bytes(5, "big") + raw_id, part[:size])
            if is_end:
                del self._uploads[stream_id]
