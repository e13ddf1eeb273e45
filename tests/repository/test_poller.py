import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from modelserver.errors import ConfigError, InternalError, ServerError
from modelserver.repository.fingerprint import FileStamp, ModelFingerprint, TreeFingerprint
from modelserver.repository.poller import Poller, PollPlan, PollScan, back_off_s, diff
from modelserver.repository.state import VersionsFailedError
from tests.support.manual_clock import ManualClock

INTERVAL_S = 10.0


def state(number: int) -> ModelFingerprint:
    return ModelFingerprint(Path("m"), TreeFingerprint((FileStamp("file", number, number),)))


A, B = state(1), state(2)


@pytest.mark.parametrize(
    ("previous", "current", "applied", "plan"),
    [
        pytest.param({}, {}, {}, PollPlan(), id="nothing"),
        pytest.param({}, {"m": A}, {}, PollPlan(), id="seen once"),
        pytest.param({"m": A}, {"m": A}, {}, PollPlan(load=("m",)), id="seen twice"),
        pytest.param({"m": A}, {"m": B}, {}, PollPlan(), id="still being copied"),
        pytest.param({"m": A}, {"m": A}, {"m": A}, PollPlan(), id="as loaded"),
        pytest.param({"m": B}, {"m": B}, {"m": A}, PollPlan(load=("m",)), id="changed and stable"),
        pytest.param({"m": B}, {"m": A}, {"m": A}, PollPlan(), id="changed and changed back"),
        pytest.param({"m": A}, {}, {"m": A}, PollPlan(), id="gone once"),
        pytest.param({}, {}, {"m": A}, PollPlan(unload=("m",)), id="gone twice"),
        pytest.param({"m": None}, {"m": None}, {}, PollPlan(), id="held back"),
        pytest.param({"m": None}, {"m": None}, {"m": A}, PollPlan(), id="loaded and held back"),
        pytest.param({"m": None}, {"m": A}, {}, PollPlan(), id="released just now"),
        pytest.param({"a": A, "b": B}, {"a": A, "b": B}, {"c": A}, PollPlan(("a", "b"), ("c",)), id="several"),
    ],
)
def test_diff(previous: PollScan, current: PollScan, applied: dict[str, ModelFingerprint], plan: PollPlan) -> None:
    assert diff(previous, current, applied) == plan


def test_back_off_doubles_up_to_a_limit() -> None:
    assert [back_off_s(count, 15.0) for count in (1, 2, 3)] == [30.0, 60.0, 120.0]
    assert back_off_s(1000, 15.0) == 600.0


class Disk:
    """A repository for the poller: its scans, and what it was told to do."""

    def __init__(self) -> None:
        self.scan: PollScan | OSError = {}
        self.calls: list[tuple[str, str]] = []
        self.errors: dict[str, ServerError] = {}
        self.gates: dict[str, asyncio.Event] = {}

    async def read(self) -> PollScan:
        if isinstance(self.scan, OSError):
            raise self.scan
        return dict(self.scan)

    async def load(self, name: str) -> None:
        self.calls.append(("load", name))
        if name in self.gates:
            await self.gates[name].wait()
        if name in self.errors:
            raise self.errors[name]

    async def unload(self, name: str) -> None:
        self.calls.append(("unload", name))


class Trial:
    """A poller whose task never wakes: tests poll by hand on a clock that stands still."""

    def __init__(self) -> None:
        self.disk = Disk()
        self.clock = ManualClock()
        self.poller = Poller(
            self.disk.read,
            self.disk.load,
            self.disk.unload,
            interval_s=INTERVAL_S,
            clock=self.clock,
            sleep=self._sleep_for_ever,
        )

    async def _sleep_for_ever(self, seconds: float) -> None:
        assert seconds == INTERVAL_S
        await asyncio.Event().wait()

    async def poll(self, scan: PollScan | OSError) -> list[tuple[str, str]]:
        """What one poll of `scan` starts."""
        self.disk.scan = scan
        self.disk.calls.clear()
        await self.poller.poll_once()
        for _ in range(3):
            await asyncio.sleep(0)
        return list(self.disk.calls)


@pytest.fixture
async def trial() -> AsyncIterator[Trial]:
    trial = Trial()
    trial.poller.start({}, {})
    yield trial
    await trial.poller.stop()


async def test_loads_what_stays_the_same_and_unloads_what_stays_away(trial: Trial) -> None:
    assert await trial.poll({"m": A}) == []
    assert await trial.poll({"m": A}) == [("load", "m")]
    assert await trial.poll({"m": A}) == []
    assert await trial.poll({}) == []
    assert await trial.poll({}) == [("unload", "m")]
    assert await trial.poll({}) == []


async def test_what_was_loaded_at_start_is_not_loaded_again() -> None:
    trial = Trial()
    trial.poller.start({"m": A, "held": None}, {})
    assert await trial.poll({"m": A, "held": None}) == []
    assert await trial.poll({"m": B, "held": A}) == []
    assert await trial.poll({"m": B, "held": A}) == [("load", "held"), ("load", "m")]
    await trial.poller.stop()


async def test_a_repository_that_cannot_be_read_changes_nothing(trial: Trial) -> None:
    await trial.poll({"m": A})
    await trial.poll({"m": A})
    for _ in range(3):
        assert await trial.poll(OSError("stale file handle")) == []
    assert await trial.poll({"m": A}) == []


async def test_a_slow_model_stalls_no_other_and_is_left_alone_meanwhile(trial: Trial) -> None:
    trial.disk.gates["slow"] = asyncio.Event()
    await trial.poll({"slow": A})
    assert await trial.poll({"slow": A, "m": A}) == [("load", "slow")]
    assert await trial.poll({"slow": B, "m": A}) == [("load", "m")]
    assert await trial.poll({"slow": B, "m": B}) == []
    assert await trial.poll({"slow": B, "m": B}) == [("load", "m")]
    trial.disk.gates.pop("slow").set()
    await trial.poller.wait_idle()
    assert await trial.poll({"slow": B, "m": B}) == [("load", "slow")]


async def test_a_failed_load_is_retried_with_back_off(trial: Trial) -> None:
    trial.disk.errors["m"] = InternalError("no memory")
    await trial.poll({"m": A})
    assert await trial.poll({"m": A}) == [("load", "m")]
    assert await trial.poll({"m": A}) == []
    trial.clock.advance_us(20_000_000)
    assert await trial.poll({"m": A}) == [("load", "m")]
    trial.clock.advance_us(20_000_000)
    assert await trial.poll({"m": A}) == []
    trial.clock.advance_us(20_000_000)
    trial.disk.errors.clear()
    assert await trial.poll({"m": A}) == [("load", "m")]
    trial.clock.advance_us(10**9)
    assert await trial.poll({"m": A}) == []


async def test_a_change_is_retried_at_once(trial: Trial) -> None:
    trial.disk.errors["m"] = InternalError("no memory")
    await trial.poll({"m": A})
    await trial.poll({"m": A})
    await trial.poll({"m": B})
    assert await trial.poll({"m": B}) == [("load", "m")]


@pytest.mark.parametrize("error", [ConfigError("bad"), VersionsFailedError("m", {1: "bad"}, needs_change=True)])
async def test_what_is_broken_waits_for_a_change(trial: Trial, error: ServerError) -> None:
    trial.disk.errors["m"] = error
    await trial.poll({"m": A})
    await trial.poll({"m": A})
    trial.clock.advance_us(10**10)
    assert await trial.poll({"m": A}) == []


async def test_a_failure_at_start_is_retried() -> None:
    trial = Trial()
    trial.poller.start({"m": A}, {"m": InternalError("no memory")})
    assert await trial.poll({"m": A}) == []
    trial.clock.advance_us(20_000_000)
    assert await trial.poll({"m": A}) == [("load", "m")]
    await trial.poller.stop()


async def test_the_task_polls_at_its_interval_and_survives_faults() -> None:
    disk = Disk()
    polls = asyncio.Queue[None]()

    async def read() -> PollScan:
        polls.put_nowait(None)
        if polls.qsize() == 1:
            raise RuntimeError("a fault of ours")
        return {"m": A}

    loaded = asyncio.Event()

    async def load(name: str) -> None:
        await disk.load(name)
        loaded.set()

    poller = Poller(read, load, disk.unload, interval_s=0.001)
    poller.start({}, {})
    async with asyncio.timeout(60):
        await loaded.wait()
    await poller.stop()
    assert disk.calls == [("load", "m")]
