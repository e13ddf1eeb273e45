"""Responses that are made in the background: no client waits, and what is made can be asked for at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from modelserver.auth.api_keys import caller_name
from modelserver.core.response import InferResponse
from modelserver.errors import InvalidArgumentError, QueueFullError
from modelserver.frontends.llm.answering import Prepared, WholeListener, count_reasoning
from modelserver.frontends.llm.requests import Requests
from modelserver.frontends.openai.responses.answers import Document, LongFrame, ResponseWriter, parts_of
from modelserver.planes.authorized import AnyDataPlane

_MAX_RUNS = 64
_MAX_RUNS_OF_KEY = 32
_MAX_BYTES = 16 << 20


class BackgroundRun(WholeListener):
    """One response while it is made, and the frames of its stream, of which the n-th has the number n.

    Event loop thread only. `grown` is told how many bytes were made; `ended` that the response is complete.
    """

    def __init__(
        self, prepared: Prepared, writer: ResponseWriter, grown: Callable[[int], None], ended: Callable[[], None]
    ) -> None:
        super().__init__(prepared, writer)
        self._making = writer
        self._grown, self._ended = grown, ended
        self._frames: list[bytes | LongFrame] = []
        self._num_bytes = 0
        self._has_more = asyncio.Event()  # followed by another one each time that it is set
        self._task: asyncio.Task[None] | None = None
        self._final: Document | None = None

    @property
    def document(self) -> Document:
        """The response as it is now."""
        return self._final if self._final is not None else self._making.so_far()

    @property
    def is_over(self) -> bool:
        return self._final is not None

    @property
    def is_streamed(self) -> bool:
        """Whether the frames of a stream are kept."""
        return self._making.is_streamed

    def begin(self, dataplane: AnyDataPlane, prepared: Prepared) -> asyncio.Task[None]:
        """Make the response in a Task of its own, which goes on without the client."""
        self._making.queue()
        self._take()
        self._task = asyncio.get_running_loop().create_task(self._run(dataplane, prepared), name="background-response")
        return self._task

    def cancel(self) -> None:
        """End it where it is; nothing for one that is over."""
        if self._final is None and self._task is not None:
            self._end(self._making.so_far(is_cancelled=True))
            self._task.cancel()

    def hear(self, prompt: int, response: InferResponse) -> bool:
        self._making.advance(self._news(prompt, response))
        self._take()
        if self._num_bytes > _MAX_BYTES:
            raise InvalidArgumentError(f"the events of the response have more than {_MAX_BYTES >> 20} MiB")
        return True

    async def parts(self, start: int) -> AsyncIterator[bytes]:
        """The frames from number `start` on, as they are made, until the response is complete."""
        while True:
            if start < len(self._frames):
                found = self._frames[start:]
                start += len(found)
                for part in parts_of(found):
                    yield part
            elif self.is_over:
                return
            else:
                await self._has_more.wait()

    async def _run(self, dataplane: AnyDataPlane, prepared: Prepared) -> None:
        try:
            with Requests(dataplane, prepared.requests, self) as requests:
                await requests.run()
            await count_reasoning(dataplane, prepared)
            document = self._making.finish()
        except Exception as error:
            document = self._making.fail(error)
        if self._final is None:
            self._end(document)

    def _end(self, document: Document) -> None:
        self._final = document
        self._take()
        self._ended()

    def _take(self) -> None:
        frames = self._making.take_frames()
        self._frames += frames
        num_bytes = sum(frame.num_bytes if isinstance(frame, LongFrame) else len(frame) for frame in frames)
        self._num_bytes += num_bytes
        self._grown(num_bytes)
        self._has_more.set()
        self._has_more = asyncio.Event()


class BackgroundRuns:
    """Those that are not over, of all callers: at most 64, and of one key at most 32."""

    def __init__(self) -> None:
        self._owners: dict[BackgroundRun, str] = {}

    def begin(self, run: BackgroundRun, dataplane: AnyDataPlane, prepared: Prepared) -> None:
        """Let it run."""
        self._owners[run] = caller_name()
        run.begin(dataplane, prepared).add_done_callback(lambda _: self._owners.pop(run))

    def check_room(self) -> None:
        """Raises QueueFullError."""
        if len(self._owners) >= _MAX_RUNS:
            raise QueueFullError(f"{_MAX_RUNS} responses are being made in the background: try again later")
        owner = caller_name()
        if owner and sum(each == owner for each in self._owners.values()) >= _MAX_RUNS_OF_KEY:
            raise QueueFullError(
                f"{_MAX_RUNS_OF_KEY} responses of your key are being made in the background: try again when one of "
                "them is complete, or cancel one"
            )

    def cancel(self) -> None:
        """End all of them: the server stops, and what they make could not be asked for."""
        for run in list(self._owners):
            run.cancel()
