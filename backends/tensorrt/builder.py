"""Has engines built in a child process: one at a time, with progress, a time limit, and an end on request."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from modelserver.backend import InternalError, ServerError, UnavailableError, UnsupportedError, always

from .build_options import BuildRequest
from .engine_info import EngineInfo, from_json
from .network_build import BuildFailedError, FailedNode, UnsupportedNodesError

log = logging.getLogger(__name__)

# How much of the end of the child's standard error is kept for a crash report.
_KEPT_ERROR_BYTES = 4096
_POLL_S = 0.2
# Two builds at once take longer than one after the other, and twice the memory.
_one_at_a_time = threading.Lock()
_ERRORS: dict[str, type[ServerError]] = {
    "invalid_argument": BuildFailedError,
    "unsupported": UnsupportedError,
    "unavailable": UnavailableError,
}


@dataclass(frozen=True, slots=True)
class BuildResult:
    """A plan that was built; `duration_s` is that of the whole process."""

    info: EngineInfo
    library_version: str
    num_bytes: int
    peak_memory_bytes: int
    duration_s: float


Progress = Callable[[str, float], None]
# Called several times a second; a build that is no longer wanted is cancelled.
IsWanted = Callable[[], bool]


def build_engine(
    request: BuildRequest,
    *,
    timeout_s: float | None = None,
    is_wanted: IsWanted = always,
    tell: Progress | None = None,
) -> BuildResult:
    """Build what `request` says. Blocking; `tell` gets phase and fraction done, from this thread.

    Raises UnsupportedNodesError with all nodes, BuildFailedError or another ServerError with TensorRT's reason,
    UnavailableError after `timeout_s`, or soon after `is_wanted` says no; the process is gone in any case.
    """
    with _turn(is_wanted):
        started_s = time.monotonic()
        child = _start()
        try:
            answer = _converse(child, request, _Watch(started_s, timeout_s, is_wanted), tell or _ignore)
        finally:
            _end(child)
    if "error" in answer:
        raise _error(answer)
    return BuildResult(
        from_json(answer["info"], request.plan),
        answer["library_version"],
        answer["num_bytes"],
        answer["peak_memory_bytes"],
        time.monotonic() - started_s,
    )


@dataclass(frozen=True, slots=True)
class _Watch:
    """When to give up."""

    started_s: float
    timeout_s: float | None
    is_wanted: IsWanted

    def check(self, onnx: str) -> None:
        if not self.is_wanted():
            raise UnavailableError(f"{onnx}: the build of its engine was cancelled")
        if self.timeout_s is not None and time.monotonic() - self.started_s > self.timeout_s:
            raise UnavailableError(
                f"{onnx}: its engine was not built within {self.timeout_s:g} s; allow more with "
                "--backend-config=tensorrt,build-timeout-s=SECONDS, or build it ahead with modelserver build-engine"
            )


@contextlib.contextmanager
def _turn(is_wanted: IsWanted) -> Iterator[None]:
    while not _one_at_a_time.acquire(timeout=_POLL_S):
        if not is_wanted():
            raise UnavailableError("the build of an engine was cancelled while it waited for another")
    try:
        yield
    finally:
        _one_at_a_time.release()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603  # our own module, by our own interpreter
        [sys.executable, "-m", f"{__package__}.build_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Ctrl-C is for us: we end the child.
        start_new_session=True,
    )


def _converse(child: subprocess.Popen[bytes], request: BuildRequest, watch: _Watch, tell: Progress) -> dict[str, Any]:
    """The child's final message. Raises InternalError, with its output, if it ends without one."""
    assert child.stdin is not None, "it has pipes"
    errors = b""
    with contextlib.suppress(BrokenPipeError):  # it ended at once: its last words say why
        child.stdin.write(json.dumps(request.to_json()).encode() + b"\n")
        child.stdin.flush()
    for is_answer, data in _lines(child, lambda: watch.check(request.onnx)):
        if not is_answer:
            errors = (errors + data)[-_KEPT_ERROR_BYTES:]
            continue
        answer: dict[str, Any] = json.loads(data)
        if "phase" not in answer:
            return answer
        tell(answer["phase"], answer["fraction"])
    status = child.wait()
    how = f"signal {-status}" if status < 0 else f"status {status}"
    last = errors.decode(errors="replace").strip() or "nothing"
    raise InternalError(
        f"{request.onnx}: the process that builds its engine ended with {how} (killed for memory, or a fault in "
        f"TensorRT); it last wrote: {last}"
    )


def _lines(child: subprocess.Popen[bytes], check: Callable[[], None]) -> Iterator[tuple[bool, bytes]]:
    """Whole lines of answers, and pieces of the standard error as they come, until both are at their end."""
    with selectors.DefaultSelector() as selector:
        pipes: list[tuple[IO[bytes] | None, bool]] = [(child.stdout, True), (child.stderr, False)]
        for pipe, is_answer in pipes:
            assert pipe is not None, "it has pipes"
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ, is_answer)
        rest = b""
        while selector.get_map():
            check()
            for key, _ in selector.select(_POLL_S):
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                elif not key.data:
                    yield False, data
                else:
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        yield True, line


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and close its pipes."""
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _error(answer: dict[str, Any]) -> ServerError:
    if "nodes" in answer:
        error = UnsupportedNodesError("", tuple(FailedNode(*node) for node in answer["nodes"]))
        error.message = answer["error"]
        error.args = (error.message,)
        return error
    return _ERRORS.get(answer["code"], InternalError)(answer["error"])


def _ignore(phase: str, fraction: float) -> None:
    del phase, fraction
