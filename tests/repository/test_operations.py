import asyncio

import pytest

from modelserver.errors import InternalError, NotFoundError, UnavailableError
from modelserver.repository.load_request import LoadRequest
from modelserver.repository.operations import OperationQueue, OperationRequest, UnloadRequest

PLAIN = LoadRequest()
OVERRIDE = LoadRequest(config_json="{}")
UNLOAD = UnloadRequest()


class Trial:
    """A queue whose operations end when the test says so."""

    def __init__(self) -> None:
        self.queue = OperationQueue("m", self.perform)
        self.begun: list[OperationRequest] = []
        self.ends: asyncio.Queue[Exception | None] = asyncio.Queue()

    async def perform(self, request: OperationRequest) -> None:
        self.begun.append(request)
        if (error := await self.ends.get()) is not None:
            raise error

    async def submit(self, request: OperationRequest) -> asyncio.Future[None]:
        done = self.queue.submit(request)
        await asyncio.sleep(0)
        return done


@pytest.fixture
async def trial() -> Trial:
    return Trial()


async def test_one_runs_and_one_waits(trial: Trial) -> None:
    first = await trial.submit(PLAIN)
    second = await trial.submit(UNLOAD)
    assert trial.begun == [PLAIN]
    assert trial.queue.is_unload_waiting()
    for _ in range(2):
        trial.ends.put_nowait(None)
    await asyncio.gather(first, second)
    assert trial.begun == [PLAIN, UNLOAD]
    await asyncio.sleep(0)
    assert trial.queue.runner is None


@pytest.mark.parametrize("request_", [PLAIN, UNLOAD])
async def test_the_same_again_joins_the_one_that_waits(trial: Trial, request_: OperationRequest) -> None:
    await trial.submit(PLAIN)
    assert await trial.submit(request_) is await trial.submit(request_)
    trial.queue.supersede("over")
    trial.ends.put_nowait(None)


@pytest.mark.parametrize(
    ("waiting", "newer", "words"),
    [
        (PLAIN, UNLOAD, "newer unload"),
        (UNLOAD, PLAIN, "newer load"),
        (OVERRIDE, PLAIN, "newer load"),
        (OVERRIDE, OVERRIDE, "newer load"),
    ],
)
async def test_a_newer_operation_takes_the_place(
    trial: Trial, waiting: OperationRequest, newer: OperationRequest, words: str
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


def version(number: int) -> LoadRequest:
    return LoadRequest(version=number)


async def test_operations_on_versions_do_not_supersede_each_other(trial: Trial) -> None:
    first = await trial.submit(PLAIN)
    others = [await trial.submit(request) for request in (version(1), version(2), UnloadRequest(3))]
    for _ in range(4):
        trial.ends.put_nowait(None)
    await asyncio.gather(first, *others)
    assert trial.begun == [PLAIN, version(1), version(2), UnloadRequest(3)]


@pytest.mark.parametrize(("newer", "words"), [(UnloadRequest(1), "newer unload of version 1"), (PLAIN, "newer load")])
async def test_a_newer_operation_on_the_version_or_the_model_takes_the_place(
    trial: Trial, newer: OperationRequest, words: str
) -> None:
    await trial.submit(PLAIN)
    superseded, other = await trial.submit(version(1)), await trial.submit(version(2))
    newest = await trial.submit(newer)
    with pytest.raises(UnavailableError, match=words):
        await superseded
    for _ in range(3):
        trial.ends.put_nowait(None)
    await newest
    assert (other.exception() is None) is (newer.version == 1)


async def test_an_unload_that_waits_concerns_its_version_only(trial: Trial) -> None:
    await trial.submit(version(1))
    await trial.submit(UnloadRequest(2))
    assert [trial.queue.is_unload_waiting(number) for number in (None, 1, 2)] == [False, False, True]
    trial.queue.supersede("over")
    trial.ends.put_nowait(None)


async def test_a_load_with_an_override_is_never_joined(trial: Trial) -> None:
    await trial.submit(PLAIN)
    one = await trial.submit(LoadRequest(config_json="{}", version=1))
    two = await trial.submit(LoadRequest(config_json="{}", version=1))
    assert one is not two
    with pytest.raises(UnavailableError, match="newer load of version 1"):
        await one
    trial.queue.supersede("over")
    trial.ends.put_nowait(None)
