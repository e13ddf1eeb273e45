"""Instances in child processes: batches, mischief of every kind, and what is left afterwards."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.waiting import PATIENCE_S, until_true

from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Tensor
from modelserver.errors import ErrorCode, InternalError, InvalidArgumentError, ServerError, UnavailableError
from modelserver.execution.process import child_connection
from modelserver.execution.process.child_process import call_in_process
from modelserver.execution.process.instance import ProcessInstance
from modelserver.execution.process.packing import Payload, response_slices
from modelserver.execution.process.recipe import ProcessOptions, Recipe, RestartOptions
from modelserver.telemetry.measurement import ProcessRestarts, RestartReason

TESTS = (str(Path(__file__).resolve().parent.parent.parent),)
MIB = 1 << 20
# What a busy machine is given where a child had no time to show what it does.
MORE_TIME_S = (5.0, 20.0)


def recipe(function: str, **arguments: Any) -> Recipe:
    return Recipe(f"support.hosted:{function}", arguments, TESTS)


def request(*, data: object = (1.0, 2.0), cancelled: bool = False, **parameters: Any) -> InFlightRequest:
    array = np.asarray(data, np.float32)
    made = InFlightRequest(
        model_name="m", version=1, inputs={"x": Tensor("x", Datatype.FP32, array)}, parameters=parameters
    )
    made.is_cancelled = cancelled
    return made


def outputs(entry: InferResponse | ServerError) -> dict[str, Any]:
    assert isinstance(entry, InferResponse), entry
    return {tensor.name: tensor.data for tensor in entry.outputs}


def ask(instance: ProcessInstance, action: str) -> Any:
    """The single value that the instance answers to `action`."""
    (entry,) = instance.execute([request(do=action)])
    (array,) = outputs(entry).values()
    return array[0]


@pytest.fixture(scope="module")
def echo() -> Iterator[ProcessInstance]:
    """An instance that tests may use but not harm."""
    instance = ProcessInstance("echo_0", recipe("echo"))
    yield instance
    instance.close()


@pytest.fixture
def start() -> Iterator[Callable[..., ProcessInstance]]:
    """Starts instances that are closed after the test."""
    started: list[ProcessInstance] = []

    def start_one(function: str = "echo", options: ProcessOptions | None = None, **arguments: Any) -> ProcessInstance:
        started.append(ProcessInstance(f"{function}_0", recipe(function, **arguments), options))
        return started[-1]

    yield start_one
    for instance in started:
        instance.close()


# ---- batches


@pytest.mark.parametrize("datatype", list(Datatype))
def test_every_datatype_makes_the_round_trip(echo: ProcessInstance, datatype: Datatype) -> None:
    raw: list[Any] = [b"", b"ab\0", b"c" * 300] if datatype is Datatype.BYTES else [0, 1, 1]
    data = np.array(raw, datatype.numpy).reshape(3, 1)
    (entry,) = echo.execute([InFlightRequest(model_name="m", version=1, inputs={"x": Tensor("x", datatype, data)})])
    assert isinstance(entry, InferResponse)
    assert entry.outputs[0].datatype is datatype
    np.testing.assert_array_equal(entry.outputs[0].data, data)


@pytest.mark.parametrize("nbytes", [MIB, 100 * MIB])
def test_large_tensors(echo: ProcessInstance, nbytes: int) -> None:
    data = np.arange(nbytes // 4, dtype=np.float32)
    (entry,) = echo.execute([request(data=data)])
    np.testing.assert_array_equal(outputs(entry)["x"], data)


def test_a_batch_is_answered_in_order_with_parameters(echo: ProcessInstance) -> None:
    batch = [request(data=[number], number=number, half=number / 2, name=f"n{number}") for number in range(40)]
    for number, entry in enumerate(echo.execute(batch)):
        assert outputs(entry)["x"].tolist() == [number]
        assert isinstance(entry, InferResponse)
        assert entry.parameters == {"number": number, "half": number / 2, "name": f"n{number}"}


def test_outputs_stay_valid_while_the_next_batches_run(echo: ProcessInstance) -> None:
    kept = [
        outputs(echo.execute([request(data=np.full(MIB // 4, number, np.float32))])[0])["x"] for number in range(12)
    ]
    for number, array in enumerate(kept):
        assert np.all(array == number)


def test_inputs_that_the_instance_keeps_stay_valid(start: Callable[..., ProcessInstance]) -> None:
    instance = start()
    instance.execute([request(data=np.full(MIB // 4, 3, np.float32), do="keep")])
    for _ in range(4):
        instance.execute([request(data=np.zeros(MIB // 4, np.float32))])
    assert ask(instance, "kept_sum") == 3 * MIB // 4


def test_the_fields_of_a_request_arrive(echo: ProcessInstance) -> None:
    made = request(do="describe")
    made.id, made.sequence_id, made.sequence_start, made.timeout_us = "r-1", "sequence", True, 1500
    (entry,) = echo.execute([made])
    assert outputs(entry)["fields"][0] == b"('r-1', 'sequence', True, False, 1500)"


def test_one_refused_request_leaves_its_batchmates(echo: ProcessInstance) -> None:
    bad = InFlightRequest(
        model_name="m", version=1, inputs={"x": Tensor("x", Datatype.BYTES, np.array([1], dtype=object))}
    )
    entries = echo.execute([request(), request(do="refuse not you"), bad, request(huge=1 << 70), request()])
    assert isinstance(entries[1], ServerError)
    assert (entries[1].code, entries[1].message) == (ErrorCode.INVALID_ARGUMENT, "not you")
    assert isinstance(entries[2], InvalidArgumentError)
    assert isinstance(entries[3], InvalidArgumentError)
    assert outputs(entries[0])["x"].tolist() == outputs(entries[4])["x"].tolist() == [1.0, 2.0]


def test_an_exception_fails_the_batch_and_says_where(echo: ProcessInstance) -> None:
    pid = echo.pid
    with pytest.raises(InternalError, match=r"ValueError: no luck\n\nAt:\n.*hosted.py\(\d+\): fail") as caught:
        echo.execute([request(), request(do="fail no luck")])
    assert "child.py" not in caught.value.message
    assert echo.pid == pid


@pytest.mark.parametrize("cancelled", [True, False])
def test_the_instance_can_ask_whether_a_request_is_cancelled(echo: ProcessInstance, cancelled: bool) -> None:
    entries = echo.execute([request(), request(do="is_cancelled", cancelled=cancelled)])
    assert outputs(entries[1])["is_cancelled"].tolist() == [cancelled]


def test_instances_run_side_by_side(
    echo: ProcessInstance, start: Callable[..., ProcessInstance], tmp_path: Path
) -> None:
    other = start()
    assert other.pid != echo.pid
    here, there = tmp_path / "here", tmp_path / "there"
    with ThreadPoolExecutor(2) as pool:
        met = [
            pool.submit(echo.execute, [request(do=f"meet {here} {there}")]),
            pool.submit(other.execute, [request(do=f"meet {there} {here}")]),
        ]
        assert all(outputs(each.result(PATIENCE_S)[0])["x"].tolist() == [1.0, 2.0] for each in met)


# ---- crashes


@pytest.mark.parametrize(
    ("action", "reason"),
    [("exit 3", "exited with code 3"), ("segfault", "was killed by signal SIGSEGV")],
)
def test_a_crash_fails_its_batch_only_and_the_child_comes_back(
    start: Callable[..., ProcessInstance], echo: ProcessInstance, action: str, reason: str
) -> None:
    instance, bystander = start(), echo.pid
    pid = instance.pid
    with pytest.raises(InternalError, match=f"the process of echo_0 {reason}; its last output was:") as caught:
        instance.execute([request(), request(do=action)])
    assert ("about to leave" if action == "exit 3" else "hosted.py") in caught.value.message
    assert outputs(instance.execute([request()])[0])["x"].tolist() == [1.0, 2.0]
    assert instance.pid != pid
    assert echo.pid == bystander
    assert echo.is_ready()


def test_a_child_that_has_lost_its_gpu_answers_and_is_started_again(start: Callable[..., ProcessInstance]) -> None:
    """CUDA answers every later call of the process with the same error."""
    instance = start()
    pid = instance.pid
    with pytest.raises(InternalError, match="device-side assert triggered"):
        instance.execute([request(do="fail CUDA error: device-side assert triggered")])
    assert outputs(instance.execute([request()])[0])["x"].tolist() == [1.0, 2.0]
    assert instance.pid != pid
    pid = instance.pid
    with pytest.raises(InternalError, match="out of memory"):
        instance.execute([request(do="fail CUDA error: out of memory")])
    assert outputs(instance.execute([request()])[0])["x"].tolist() == [1.0, 2.0]
    assert instance.pid == pid


def test_a_child_that_cannot_be_understood_is_ended(
    start: Callable[..., ProcessInstance], caplog: pytest.LogCaptureFixture
) -> None:
    instance = start()
    with pytest.raises(InternalError, match="was killed by signal SIGKILL"):
        instance.execute([request(do="mumble")])
    assert "echo_0 sent an invalid message, killing it: Expected `str`, got `bytes`" in caplog.text
    assert outputs(instance.execute([request()])[0])["x"].tolist() == [1.0, 2.0]


def test_killed_while_executing(start: Callable[..., ProcessInstance]) -> None:
    instance = start()
    pid = instance.pid
    assert pid is not None
    timer = threading.Timer(0.2, os.kill, (pid, signal.SIGKILL))
    timer.start()
    with pytest.raises(InternalError, match="was killed by signal SIGKILL"):
        instance.execute([request(do="sleep 30")])
    timer.join()
    assert outputs(instance.execute([request()])[0])["x"].tolist() == [1.0, 2.0]


def test_killed_while_idle_costs_no_request(start: Callable[..., ProcessInstance]) -> None:
    instance = start()
    pid = instance.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until_true(lambda: instance.pid != pid, "another child came")
    assert outputs(instance.execute([request()])[0])["x"].tolist() == [1.0, 2.0]


def test_a_batch_that_a_killed_child_never_read_goes_to_the_next_one(start: Callable[..., ProcessInstance]) -> None:
    instance = start()
    pid = instance.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(0.2, os.kill, (pid, signal.SIGKILL))
    timer.start()
    assert outputs(instance.execute([request()])[0])["x"].tolist() == [1.0, 2.0]
    timer.join()
    assert instance.pid != pid


class _PausedCopy:
    """Copies to shared memory stop after the first slice until `go_on` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.go_on = threading.Event(), threading.Event()
        self.targets: list[np.ndarray] = []
        write = Payload.writing

        def writing(payload: Payload, target: np.ndarray) -> Iterator[None]:
            self.targets.append(target)
            for _ in write(payload, target):
                self.has_begun.set()
                while not self.go_on.is_set():
                    yield

        monkeypatch.setattr(Payload, "writing", writing)


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> _PausedCopy:
    return _PausedCopy(monkeypatch)


def test_a_child_that_dies_during_the_copy_of_a_batch_never_began_it(
    start: Callable[..., ProcessInstance], paused: _PausedCopy
) -> None:
    instance = start()
    pid = instance.pid
    assert pid is not None
    data = np.arange(4 * MIB, dtype=np.float32)
    with ThreadPoolExecutor(2) as pool:
        large = pool.submit(instance.execute, [request(data=data)])
        assert paused.has_begun.wait(PATIENCE_S)
        small = pool.submit(instance.execute, [request()])
        os.kill(pid, signal.SIGKILL)
        until_true(lambda: instance.pid not in (pid, None), "another child came")
        paused.go_on.set()
        np.testing.assert_array_equal(outputs(large.result(PATIENCE_S)[0])["x"], data)
        assert outputs(small.result(PATIENCE_S)[0])["x"].tolist() == [1.0, 2.0]
    del large, small
    references = [weakref.ref(target) for target in paused.targets]
    paused.targets.clear()
    assert len(references) == 2  # of the dead child, and of the next
    until_true(lambda: not any(reference() is not None for reference in references), "no memory is held")


def test_a_request_that_is_cancelled_during_its_copy_holds_nothing_up(
    start: Callable[..., ProcessInstance], paused: _PausedCopy
) -> None:
    instance = start()
    cancelled = request(data=np.zeros(4 * MIB), do="is_cancelled")
    with ThreadPoolExecutor(2) as pool:
        large = pool.submit(instance.execute, [cancelled])
        assert paused.has_begun.wait(PATIENCE_S)
        small = pool.submit(instance.execute, [request()])
        cancelled.cancel()
        assert instance.is_ready()
        assert not small.done()  # it goes behind the large one
        paused.go_on.set()
        assert outputs(large.result(PATIENCE_S)[0])["is_cancelled"].tolist() == [True]
        assert outputs(small.result(PATIENCE_S)[0])["x"].tolist() == [1.0, 2.0]


def test_closing_waits_for_a_batch_that_is_being_copied(
    start: Callable[..., ProcessInstance], paused: _PausedCopy
) -> None:
    instance = start()
    with ThreadPoolExecutor(2) as pool:
        large = pool.submit(instance.execute, [request(data=np.ones(4 * MIB))])
        assert paused.has_begun.wait(PATIENCE_S)
        closing = pool.submit(instance.close)
        paused.go_on.set()
        assert outputs(large.result(PATIENCE_S)[0])["x"].sum() == 4 * MIB
        closing.result(PATIENCE_S)


def test_a_child_that_dies_while_its_answer_is_unpacked_has_answered(
    start: Callable[..., ProcessInstance], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, give_up = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Iterator[None]:
        has_begun.set()
        while not give_up.is_set():
            yield
        yield from response_slices(*arguments)

    monkeypatch.setattr(child_connection, "response_slices", slow)
    instance = start()
    pid = instance.pid
    assert pid is not None
    elements = np.array([b"a" * 2 * MIB, b"b"], object)
    text = InFlightRequest(model_name="m", version=1, inputs={"x": Tensor("x", Datatype.BYTES, elements)})
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(instance.execute, [text])
        assert has_begun.wait(PATIENCE_S)
        os.kill(pid, signal.SIGKILL)
        assert outputs(answer.result(PATIENCE_S)[0])["x"].tolist() == elements.tolist()
    give_up.set()


def test_a_child_that_dies_takes_one_batch_along_and_no_other(start: Callable[..., ProcessInstance]) -> None:
    instance = start()
    pid = instance.pid
    slow, deadly, *behind = instance.execute_batches(
        [[request(do="sleep 0.01")], [request(do="exit 3")], [request(data=[3.0])], [request(data=[4.0]), request()]]
    )
    assert not isinstance(slow, ServerError)
    assert isinstance(deadly, InternalError)
    assert "exited with code 3" in deadly.message
    assert [len(result) for result in behind if not isinstance(result, ServerError)] == [1, 2]
    assert instance.pid not in (pid, None)


def test_what_a_child_begins_again_after_a_death_is_what_it_never_began(start: Callable[..., ProcessInstance]) -> None:
    """The poison is executed once, however many are behind it."""
    instance = start()
    results = instance.execute_batches([[request(do="segfault")], *[[request(data=[float(n)])] for n in range(20)]])
    assert [isinstance(result, ServerError) for result in results] == [True, *[False] * 20]
    for number, result in enumerate(results[1:]):
        assert not isinstance(result, ServerError)
        (entry,) = result
        assert outputs(entry)["x"].tolist() == [float(number)]


# ---- crashes of batches of several requests, executed once more one by one


@pytest.fixture
def retrying(start: Callable[..., ProcessInstance]) -> Callable[..., ProcessInstance]:
    """Starts instances whose batches are retried, and whose restarts cost no pause."""
    restart = RestartOptions(first_pause_s=0.0)

    def start_one(**options: Any) -> ProcessInstance:
        return start(options=ProcessOptions(**{"retries_batches": True, "restart": restart, **options}))

    return start_one


@pytest.mark.parametrize("position", [0, 1, 3])
def test_only_the_request_that_kills_fails(retrying: Callable[..., ProcessInstance], position: int) -> None:
    instance = retrying()
    batch = [request(data=[float(n)]) for n in range(4)]
    batch[position] = request(do="exit 3")
    entries = instance.execute(batch)
    for number, entry in enumerate(entries):
        if number == position:
            assert isinstance(entry, InternalError)
            assert "exited with code 3" in entry.message
            assert entry.message.endswith("The request was executed alone, after a batch with it")
        else:
            assert entry is not None
            assert outputs(entry)["x"].tolist() == [float(number)]


def test_each_request_that_kills_fails_once_and_those_behind_are_executed(
    retrying: Callable[..., ProcessInstance],
) -> None:
    """Two poisons in one batch and one in the next: four children die, and everybody else is answered."""
    instance = retrying()
    first, second, third = instance.execute_batches(
        [
            [request(do="exit 1"), request(data=[1.0]), request(do="exit 1")],
            [request(data=[2.0]), request(do="segfault")],
            [request(data=[3.0])],
        ]
    )
    assert [[isinstance(entry, ServerError) for entry in result] for result in (first, second, third)] == [  # type: ignore[union-attr]
        [True, False, True],
        [False, True],
        [False],
    ]


def test_a_batch_survives_a_kill_from_outside(retrying: Callable[..., ProcessInstance], tmp_path: Path) -> None:
    instance = retrying()
    pid = instance.pid
    assert pid is not None
    mark = tmp_path / "mark"
    killer = threading.Thread(target=lambda: (until_true(mark.exists, "it executes"), os.kill(pid, signal.SIGKILL)))
    killer.start()
    entries = instance.execute([request(do=f"hang_once {mark}"), request(data=[2.0])])
    killer.join()
    assert [outputs(entry)["x"].tolist() for entry in entries if entry is not None] == [[1.0, 2.0], [2.0]]


def test_what_nobody_wants_any_more_is_not_executed_again(
    retrying: Callable[..., ProcessInstance],
) -> None:
    instance = retrying()
    late = request()
    late.deadline_ns = time.monotonic_ns()
    gone, poison, expired, well = instance.execute([request(cancelled=True), request(do="exit 1"), late, request()])
    assert [type(entry).__name__ for entry in (gone, poison, expired)] == [
        "CancelledError",
        "InternalError",
        "QueueTimeoutError",
    ]
    assert isinstance(well, InferResponse)


def test_restarts_bound_the_retries(retrying: Callable[..., ProcessInstance]) -> None:
    """The crash budget holds: what waits for the next child longer than it may is refused."""
    instance = retrying(restart=RestartOptions(first_pause_s=30.0), restart_patience_s=0.05)
    entries = instance.execute([request(do="exit 1") for _ in range(8)])
    kinds = {type(entry).__name__ for entry in entries}
    assert kinds <= {"InternalError", "UnavailableError"}
    assert sum(isinstance(entry, UnavailableError) for entry in entries) >= 7


def test_a_batch_that_was_killed_because_it_hung_is_not_retried(retrying: Callable[..., ProcessInstance]) -> None:
    instance = retrying(execute_timeout_s=0.3)
    with pytest.raises(InternalError, match="did not answer within"):
        instance.execute([request(do="sleep 30"), request()])


def test_closing_ends_what_is_to_be_retried(retrying: Callable[..., ProcessInstance], tmp_path: Path) -> None:
    instance = retrying(restart=RestartOptions(first_pause_s=30.0), restart_patience_s=60.0)
    with pytest.raises(InternalError):
        instance.execute([request(do="exit 1")])  # the next crash is followed by a pause
    mark = tmp_path / "mark"
    closer = threading.Thread(
        target=lambda: (until_true(lambda: mark.exists() and instance.pid is None, "it died"), instance.close())
    )
    closer.start()
    entries = instance.execute([request(do=f"note_and_exit {mark}"), request()])
    closer.join()
    assert all(isinstance(entry, ServerError) for entry in entries)


def test_a_child_whose_offspring_holds_its_files_is_still_seen_to_die(start: Callable[..., ProcessInstance]) -> None:
    instance = start()
    instance.execute([request(do="fork")])
    assert instance.pid is not None
    offspring = psutil.Process(instance.pid).children()
    with pytest.raises(InternalError, match="exited with code 1"):
        instance.execute([request(do="exit 1")])
    until_true(lambda: not any(process.is_running() for process in offspring), "its offspring ended")


def test_a_crash_budget_bounds_the_restarts(start: Callable[..., ProcessInstance]) -> None:
    restart = RestartOptions(first_pause_s=30.0)
    instance = start(options=ProcessOptions(restart=restart, restart_patience_s=0.05))
    with pytest.raises(InternalError):
        instance.execute([request(do="exit 1")])
    until_true(instance.is_ready, "it is ready")  # the first restart came at once
    with pytest.raises(InternalError):
        instance.execute([request(do="exit 2")])
    assert not instance.is_ready()
    with pytest.raises(
        UnavailableError, match=r"echo_0 crashed and waits .* in \d+\.\d s \(2 crashes lately\).*exited with code 2"
    ):
        instance.execute([request()])


def test_a_restart_that_fails_is_a_crash_too(start: Callable[..., ProcessInstance], tmp_path: Path) -> None:
    options = ProcessOptions(restart=RestartOptions(first_pause_s=30.0), restart_patience_s=0.1)
    instance = start("crash_after_first_start", options, path=str(tmp_path / "started"))
    with pytest.raises(InternalError):
        instance.execute([request(do="exit 1")])

    def says_why() -> bool:
        with pytest.raises(UnavailableError) as caught:
            instance.execute([request()])
        return "once was enough" in caught.value.message

    until_true(says_why, "the restart failed too")
    assert not instance.is_ready()


def test_restarts_are_counted_by_what_ended_the_process_before(
    start: Callable[..., ProcessInstance], tmp_path: Path
) -> None:
    options = ProcessOptions(restart=RestartOptions(first_pause_s=0.0), restart_patience_s=60.0)
    instance = start("stand_unless", options, path=str(tmp_path / "broken"))
    restarts = ProcessRestarts()
    instance.count_restarts(restarts)
    for action in ("exit 1", "exit 0", "segfault"):
        with pytest.raises(InternalError):
            instance.execute([request(do=action)])
        instance.execute([request()])
    counts = {RestartReason.EXITED: 2, RestartReason.KILLED: 1, RestartReason.HUNG: 0, RestartReason.NOT_STARTED: 0}
    assert restarts.snapshot() == counts
    (tmp_path / "broken").touch()
    assert instance.pid is not None
    os.kill(instance.pid, signal.SIGKILL)
    until_true(lambda: restarts.snapshot()[RestartReason.NOT_STARTED] > 0, "the start that failed is counted")
    assert restarts.snapshot()[RestartReason.KILLED] == 2


def test_a_batch_that_hangs_is_killed_and_shows_where(start: Callable[..., ProcessInstance]) -> None:
    for timeout_s in (2.0, *MORE_TIME_S):
        instance = start(options=ProcessOptions(execute_timeout_s=timeout_s))
        restarts = ProcessRestarts()
        instance.count_restarts(restarts)
        with pytest.raises(InternalError, match=f"did not answer within {timeout_s} s and was killed") as caught:
            instance.execute([request(do="sleep 60")])
        assert outputs(instance.execute([request()])[0])["x"].tolist() == [1.0, 2.0]
        assert {reason for reason, count in restarts.snapshot().items() if count} == {RestartReason.HUNG}
        if re.search(r"hosted\.py.* in sleep", caught.value.message):
            return
    pytest.fail("it never showed where it hung")


def test_closing_in_a_pause_does_not_wait_for_it(start: Callable[..., ProcessInstance]) -> None:
    instance = start(options=ProcessOptions(restart=RestartOptions(first_pause_s=30.0)))
    for status in (1, 2):
        with pytest.raises(InternalError):
            instance.execute([request(do=f"exit {status}")])
    begin = time.monotonic()
    instance.close()
    assert time.monotonic() - begin < 25.0
    with pytest.raises(UnavailableError, match="echo_0 is closed"):
        instance.execute([request()])


# ---- start


def test_an_exception_at_the_start_is_raised_here() -> None:
    with pytest.raises(InternalError, match=r"ValueError: bad weights\n\nAt:\n.*hosted\.py\(\d+\): broken"):
        ProcessInstance("broken_0", recipe("broken", text="bad weights"))


def test_a_crash_at_the_start_is_raised_here() -> None:
    with pytest.raises(InternalError, match="the process of crash_0 was killed by signal SIGKILL"):
        ProcessInstance("crash_0", recipe("crash_at_start"))


def test_a_start_that_takes_too_long_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for timeout_s in (1.0, *MORE_TIME_S):
        with pytest.raises(InternalError, match=f"hang_0 did not start within {timeout_s} s"):
            ProcessInstance("hang_0", recipe("hang_at_start"), ProcessOptions(start_timeout_s=timeout_s))
        if "in hang_at_start" in caplog.text:
            return
    pytest.fail("the log never showed where it hung")


def test_a_start_that_nobody_wants_any_more_is_ended() -> None:
    answers = iter([True, False])
    with pytest.raises(UnavailableError, match="hang_0 is not wanted any more"):
        ProcessInstance("hang_0", recipe("hang_at_start"), ProcessOptions(is_wanted=lambda: next(answers)))


def test_an_unknown_recipe_is_raised_here() -> None:
    with pytest.raises(InternalError, match="ModuleNotFoundError: No module named 'no_such_module'"):
        ProcessInstance("unknown_0", Recipe("no_such_module:function"))


def test_a_call_returns_what_the_function_returns() -> None:
    assert call_in_process("sum", recipe("add", left=2, right=3), timeout_s=30, environment={}) == 5
    with pytest.raises(InternalError, match="ValueError: no"):
        call_in_process("broken", recipe("broken", text="no"), timeout_s=30, environment={})


def test_the_environment_reaches_the_child(start: Callable[..., ProcessInstance]) -> None:
    instance = start(options=ProcessOptions(environment={"OMP_NUM_THREADS": "3"}))
    assert ask(instance, "environment OMP_NUM_THREADS") == b"3"


# ---- output, readiness, signals, memory


def test_output_goes_to_the_log_line_by_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(InternalError):
        ProcessInstance("broken_0", recipe("broken", text="oh"))
    messages = [record.getMessage() for record in caplog.records]
    assert "broken_0: reading weights" in messages
    assert "broken_0: ValueError: oh" in messages


def test_a_model_that_prints_without_end_does_not_fill_the_log(
    start: Callable[..., ProcessInstance], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    instance = start(options=ProcessOptions(output_lines_per_s=10))
    with pytest.raises(InternalError, match="exited with code 3; its last output was:\na flood\na flood"):
        instance.execute([request(do="flood 200000")])
    messages = [record.getMessage() for record in caplog.records]
    # As long as the reading takes, there are ten more each second.
    assert messages.count("echo_0: a flood") < 10_000
    dropped = [int(message.split()[1]) for message in messages if "lines of its output" in message]
    assert messages.count("echo_0: a flood") + sum(dropped) == 200_000


def test_a_readiness_that_hangs_ends_the_process(start: Callable[..., ProcessInstance]) -> None:
    instance = start("never_ready", ProcessOptions(ready_timeout_s=0.2))
    restarts = ProcessRestarts()
    instance.count_restarts(restarts)
    until_true(lambda: not instance.is_ready() and restarts.snapshot()[RestartReason.HUNG] > 0, "it was killed")
    instance.execute([request()])


def test_a_killed_instance_fails_what_it_has_and_is_not_started_again(start: Callable[..., ProcessInstance]) -> None:
    instance = start()
    pid = instance.pid
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(instance.execute, [request(do="sleep 60")])
        until_true(lambda: first.running(), "it is on its way")
        instance.kill("took too long")
        with pytest.raises((InternalError, UnavailableError), match=r"echo_0 (took too long and was killed|is closed)"):
            first.result()
    until_true(lambda: not psutil.pid_exists(pid or 0), "its process is gone")
    with pytest.raises(UnavailableError, match="echo_0 is closed"):
        instance.execute([request()])


def test_an_instance_may_have_an_opinion_on_readiness(start: Callable[..., ProcessInstance], tmp_path: Path) -> None:
    mind = tmp_path / "mind"
    mind.write_text("yes")
    instance = start("wavering", path=str(mind))
    until_true(instance.is_ready, "it is ready")
    mind.write_text("no")
    until_true(lambda: not instance.is_ready(), "it is not ready")
    mind.write_text("yes")
    until_true(instance.is_ready, "it is ready")
    mind.unlink()  # is_ready raises
    until_true(lambda: not instance.is_ready(), "it is not ready")
    assert outputs(instance.execute([request()])[0])["x"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_the_group_are_left_to_the_server(echo: ProcessInstance, number: signal.Signals) -> None:
    pid = echo.pid
    assert pid is not None
    os.kill(pid, number)
    assert outputs(echo.execute([request()])[0])["x"].tolist() == [1.0, 2.0]
    assert echo.pid == pid


def test_an_idle_child_and_its_server_give_memory_back(start: Callable[..., ProcessInstance]) -> None:
    instance = start(options=ProcessOptions(idle_s=0.1))
    instance.execute([request(data=np.zeros(8 * MIB, np.float32))])
    gc.collect()
    assert instance.pid is not None
    child = psutil.Process(instance.pid)

    def shared_bytes() -> int:
        return sum(region.rss for region in child.memory_maps() if "memfd:" in region.path)

    until_true(lambda: shared_bytes() < 16 * MIB, "it gave memory back")
    assert outputs(instance.execute([request()])[0])["x"].tolist() == [1.0, 2.0]


def test_a_hang_at_close_ends_in_a_kill(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for timeout_s in (0.3, *MORE_TIME_S):
        options = ProcessOptions(close_timeout_s=timeout_s)
        instance = ProcessInstance("slow_0", recipe("echo", close_delay_s=60), options)
        pid = instance.pid
        instance.close()
        assert not psutil.pid_exists(pid or 0)
        if "in close" in caplog.text:
            return
    pytest.fail("the log never showed where it hung")


def test_six_lives_leave_nothing_behind() -> None:
    def held() -> list[int]:
        process = psutil.Process()
        return [process.num_fds(), process.num_threads(), len(process.children(recursive=True))]

    before = held()
    for number in range(6):
        instance = ProcessInstance("life_0", recipe("echo"))
        instance.execute([request(data=np.zeros(MIB // 4, np.float32))])
        if number % 5 == 0:
            with pytest.raises(InternalError):
                instance.execute([request(do="exit 1")])
        instance.close()
    gc.collect()
    # The kernel counts a thread for a moment after it was joined.
    until_true(lambda: all(now <= then for now, then in zip(held(), before, strict=True)), "all is as before")


def test_the_children_die_with_the_server(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(
        "import sys, time\n"
        "from modelserver.execution.process.instance import ProcessInstance\n"
        "from modelserver.execution.process.recipe import Recipe\n"
        f"instance = ProcessInstance('orphan_0', Recipe('support.hosted:echo', {{}}, ({TESTS[0]!r},)))\n"
        "print(instance.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with psutil.Popen([sys.executable, str(script)], stdout=-1) as server:
        child = psutil.Process(int(server.stdout.readline()))
        server.kill()
        server.wait()
    assert psutil.wait_procs([child], timeout=PATIENCE_S)[1] == []
