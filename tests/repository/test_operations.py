import asyncio

import pytest

from modelserver.errors import InternalError, NotFoundError, UnavailableError
from modelserver.repository.loader import LoadRequest
from modelserver.repository.operations import OperationQueue

PLAIN = LoadRequest()
OVERRIDE = LoadRequest(config_json="{}")


class Trial:
    """A queue whose operations end when the test says so."""

    def __init__(self) -> None:
        self.queue = OperationQueue("m", self.perform)
        self.begun: list[LoadRequest | None] = []
        self.ends: asyncio.Queue[Exception | None] = asyncio.Queue()

    async def perform(self, request: LoadRequest | None) -> None:
        self.begun.append(request)
        if (error := await self.ends.get()) is not None:
            raise error

    async def submit(self, request: LoadRequest | None) -> asyncio.Future[None]:
        done = self.queue.submit(request)
        await asyncio.sleep(0)
        return done


@pytest.fixture
async def trial() -> Trial:
    return Trial()


async def test_one_runs_and_one_waits(trial: Trial) -> None:
    first = await trial.submit(PLAIN)
    second = await trial.submit(None)
    assert trial.begun == [PLAIN]
    assert trial.queue.is_unload_waiting
    for _ in range(2):
        trial.ends.put_nowait(None)
    await asyncio.gather(first, second)
    assert trial.begun == [PLAIN, None]
    await asyncio.sleep(0)
    assert trial.queue.runner is None


@pytest.mark.parametrize("request_", [PLAIN, None])
async def test_the_same_again_joins_the_one_that_waits(trial: Trial, request_: LoadRequest | None) -> None:
    await trial.submit(PLAIN)
    assert await trial.submit(request_) is await trial.submit(request_)
    trial.queue.supersede("over")
    trial.ends.put_nowait(None)


@pytest.mark.parametrize(
    ("waiting", "newer", "words"),
    [
        (PLAIN, None, "newer unload"),
        (None, PLAIN, "newer load"),
        (OVERRIDE, PLAIN, "newer load"),
        (OVERRIDE, OVERRIDE, "newer load"),
    ],
)
async def test_a_newer_operation_takes_the_place(
    trial: Trial, waiting: LoadRequest | None, newer: LoadRequest | None, words: str
) -> None:
    await trial.submit(PLAIN)
    superseded = await trial.submit(waiting)
    newest = await trial.submit(newer)
    with pytest.raises(UnavailableError, match=words):
        await superseded
    for _ in range(2):
        trial.ends.put_nowait(None)
    await newest
    assert trial.begun == [PLAIN, newer]


async def test_a_failure_is_the_callers_and_the_next_operation_runs(trial: Trial) -> None:
    first = await trial.submit(PLAIN)
    second = await trial.submit(PLAIN)
    trial.ends.put_nowait(NotFoundError("gone"))
    trial.ends.put_nowait(None)
    with pytest.raises(NotFoundError):
        await first
    await second


async def test_a_fault_of_ours_is_logged_and_told(trial: Trial, caplog: pytest.LogCaptureFixture) -> None:
    done = await trial.submit(PLAIN)
    trial.ends.put_nowait(ZeroDivisionError("1/0"))
    with pytest.raises(InternalError, match="model 'm': ZeroDivisionError: 1/0"):
        await done
    assert "Traceback" in caplog.text


async def test_an_operation_that_is_given_up_tells_its_caller(trial: Trial) -> None:
    done = await trial.submit(PLAIN)
    assert trial.queue.runner is not None
    trial.queue.runner.cancel()
    with pytest.raises(UnavailableError, match="shutting down"):
        await done
