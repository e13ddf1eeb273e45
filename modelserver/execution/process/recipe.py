"""What a child process builds, its limits, and when it is started again after a crash."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from modelserver.backend import BackendContext, ConfigError, always
from modelserver.execution.process.child_log import DEFAULT_LINES_PER_S
from modelserver.execution.process.messages import Begin


@dataclass(frozen=True, slots=True)
class RestartOptions:
    """A crash budget: the first crash within `window_s` is followed by a restart at once, the next by growing pauses.

    So one bad request costs one start, and a client that repeats it cannot keep the machine busy with starts.
    """

    window_s: float = 60.0
    first_pause_s: float = 0.25
    max_pause_s: float = 30.0


class RestartPolicy:
    """Remembers recent crashes. Times are seconds of any one clock."""

    def __init__(self, options: RestartOptions) -> None:
        self._options = options
        self._crashes_s: deque[float] = deque()

    @property
    def num_crashes(self) -> int:
        """Crashes in the window that ended with the last one."""
        return len(self._crashes_s)

    def pause_after_crash(self, now_s: float) -> float:
        """Seconds to wait before the next start, given that the child died now."""
        while self._crashes_s and now_s - self._crashes_s[0] > self._options.window_s:
            self._crashes_s.popleft()
        self._crashes_s.append(now_s)
        if self.num_crashes == 1:
            return 0.0
        # The exponent is capped: 2.0 ** 1100 overflows.
        doubled = self._options.first_pause_s * 2.0 ** min(self.num_crashes - 2, 60)
        return min(doubled, self._options.max_pause_s)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a child builds its instance: it calls `target` ("module:function") with `arguments`.

    The function returns a BatchInstance. Arguments are of types that msgpack can carry; `python_path` is put in front
    of the child's sys.path.
    """

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    python_path: tuple[str, ...] = ()

    def message(self, *, is_call: bool, busy_wait_us: int = 0) -> Begin:
        return Begin(
            target=self.target,
            arguments=dict(self.arguments),
            python_path=list(self.python_path),
            is_call=is_call,
            busy_wait_us=busy_wait_us,
        )


def execute_timeout_s(context: BackendContext) -> float | None:
    """How long a process of the model may take for a batch: its parameter EXECUTE_TIMEOUT_SECONDS, or the server's
    --execute-timeout-secs; None: no limit. Raises ConfigError."""
    default = _common_setting(context, "execute-timeout-seconds", 0.0)
    return context.float_parameter("EXECUTE_TIMEOUT_SECONDS", default) or None


def start_timeout_s(context: BackendContext) -> float:
    """How long a process of the model may take to load it: its parameter START_TIMEOUT_SECONDS. Raises ConfigError."""
    return context.float_parameter("START_TIMEOUT_SECONDS", ProcessOptions().start_timeout_s)


def num_instances(context: BackendContext) -> int:
    """How many instances the model's config asks for."""
    return max(1, sum(max(1, group.count) for group in context.config.instance_group))


def thread_limits(num_instances: int) -> dict[str, str]:
    """The environment of one of `num_instances`: they share the cores, unless the operator set OMP_NUM_THREADS."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_instances))}


def output_lines_per_s(context: BackendContext) -> int:
    """How many lines a second a process of the model may write to the log: --model-output-lines-per-sec.

    Raises ConfigError.
    """
    return int(_common_setting(context, "output-lines-per-second", DEFAULT_LINES_PER_S))


def _common_setting(context: BackendContext, key: str, default: float) -> float:
    text = context.options.get(key, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise ConfigError(f"--backend-config={key}={text}: expected a number") from None


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """Limits and environment of a child process; with `execute_timeout_s` None, a batch may take for ever.

    `interpreter` is the Python that runs it, the server's own if empty. A first start ends once `is_wanted()` is False.
    """

    start_timeout_s: float = 300.0
    execute_timeout_s: float | None = None
    close_timeout_s: float = 10.0
    # How long an instance may take to answer whether it is ready.
    ready_timeout_s: float = 60.0
    # How long a batch waits for a child that is being restarted before it fails UNAVAILABLE.
    restart_patience_s: float = 5.0
    # After this long without traffic, shared memory beyond a few megabytes goes back to the system.
    idle_s: float = 15.0
    # How long either side polls for a likely message before it sleeps; 0: not at all.
    busy_wait_us: int = 100
    # Whether requests of a batch during which the process died are executed once more, each alone. Only if executing a
    # request twice does no harm, and `execute` returns its answer.
    retries_batches: bool = False
    restart: RestartOptions = field(default_factory=RestartOptions)
    environment: Mapping[str, str] = field(default_factory=dict)
    interpreter: str = ""
    # The limit of its log output; 0: no limit.
    output_lines_per_s: int = DEFAULT_LINES_PER_S
    is_wanted: Callable[[], bool] = always
