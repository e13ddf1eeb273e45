"""Models in Python behind both protocols: errors of single requests, and processes that die under load."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.async_clients import AsyncClient, AsyncHttpClient
from support.clients import Answer, ClientError, GrpcClient, HttpClient, ProtocolClient
from support.gate import until
from support.model_files import write_model
from support.serving import RunningServer, running_server
from support.traffic import traffic
from support.waiting import until_true

from modelserver.errors import ErrorCode

pytestmark = pytest.mark.one_layout

SOURCE = """
import os, sys, time
import numpy as np
import triton_python_backend_utils as pb_utils

REFUSE, RAISE, DIE, SLEEP = -1, -2, -3, -4

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        data = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        if (data == REFUSE).any():
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("I refuse", pb_utils.TritonError.UNSUPPORTED))
        if (data == RAISE).any():
            raise ValueError("I raise")
        if (data == DIE).any():
            print("I die", file=sys.stderr, flush=True)
            os._exit(7)
        if (data == SLEEP).any():
            time.sleep(0.3)
        pid = np.full_like(data, os.getpid())
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", data), pb_utils.Tensor("PID", pid)])
"""
REFUSE, RAISE, DIE, SLEEP = -1, -2, -3, -4

CONFIG = """
backend: "python"
max_batch_size: 8
dynamic_batching {{ }}
input [ {{ name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 1 ] }}, {{ name: "PID" data_type: TYPE_INT32 dims: [ 1 ] }} ]
instance_group [ {{ kind: KIND_CPU count: {count} }} ]
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 1 ] } ]
ensemble_scheduling {
  step [
    { model_name: "wide" model_version: -1
      input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "BETWEEN" } },
    { model_name: "steady" model_version: -1
      input_map { key: "INPUT0" value: "BETWEEN" } output_map { key: "OUTPUT0" value: "OUTPUT0" } }
  ]
}
"""


def _write(root: Path, name: str, count: int, source: str = SOURCE) -> None:
    directory = write_model(root, name, CONFIG.format(count=count))
    (directory / "1" / "model.py").write_text(source)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("python")
    _write(root, "steady", 1)
    _write(root, "wide", 1, SOURCE.replace('"OUTPUT0", data', '"OUTPUT0", data.astype(np.int64)'))
    write_model(root, "wide_then_steady", ENSEMBLE)
    with running_server(root) as running:
        yield running


Children = Callable[[], set[int]]


@pytest.fixture
def children(python: RunningServer, server: RunningServer) -> Children:
    """The living processes of models that were born since: not those of servers that other tests share."""

    def living() -> set[int]:
        return {child.pid for child in psutil.Process().children() if _is_instance(child)}

    before = living()
    return lambda: living() - before


def _is_instance(process: psutil.Process) -> bool:
    """Whether it lives, and is none of the wire's processes."""
    try:
        is_front = any(word.startswith("wire-") for word in process.cmdline())
        return not is_front and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_for_others(children: Children, before: set[int], count: int) -> None:
    def is_started_again() -> bool:
        living = children()
        return len(living) >= count and living != before

    until_true(is_started_again, "the process was started again")


def _infer(client: ProtocolClient, value: int, model: str = "steady", rows: int = 1) -> Answer:
    data = np.full((rows, 1), value, np.int32)
    answer = client.infer(model, {"INPUT0": data})
    np.testing.assert_array_equal(answer["OUTPUT0"], data)
    return answer


def test_errors_keep_their_code_and_text(protocol: type[ProtocolClient], python: RunningServer) -> None:
    with protocol(python) as client:
        with pytest.raises(ClientError, match="I refuse") as refused:
            _infer(client, REFUSE)
        assert refused.value.code is ErrorCode.UNSUPPORTED
        with pytest.raises(ClientError, match="I raise") as raised:
            _infer(client, RAISE)
        assert raised.value.code is ErrorCode.INTERNAL
        _infer(client, 5)


def test_an_output_of_another_datatype_is_sent_as_it_is(protocol: type[ProtocolClient], python: RunningServer) -> None:
    with protocol(python) as client:
        answer = _infer(client, 7, model="wide")
        assert (answer["OUTPUT0"].dtype, answer["PID"].dtype) == (np.int64, np.int32)
        with pytest.raises(ClientError, match=r"INT64.*step\[1\] \(model 'steady'\)"):
            _infer(client, 7, model="wide_then_steady")


async def test_each_request_of_a_batch_gets_its_own_answer_or_error(
    async_protocol: type[AsyncClient], python: RunningServer
) -> None:
    async with async_protocol(python) as client:
        model = python.server.repository.get("steady", None)

        def send(value: int) -> asyncio.Task[Answer]:
            return asyncio.create_task(client.infer("steady", {"INPUT0": np.full((1, 1), value, np.int32)}))

        sleeper = send(SLEEP)
        await until(lambda: python.call(lambda: model.inflight == 1 and model.queue_depth == 0), "the sleeper executed")
        values = (1, REFUSE, 2, REFUSE, 3)
        tasks = [send(value) for value in values]
        answers = await asyncio.gather(sleeper, *tasks, return_exceptions=True)
        assert [type(answer) is ClientError for answer in answers[1:]] == [value == REFUSE for value in values]
        assert [answer["OUTPUT0"].item() for answer in answers[1:] if isinstance(answer, Answer)] == [1, 2, 3]
    snapshot = python.call(model.statistics.snapshot)
    assert max(snapshot.batch_stats) == 5, "all five shared a batch"


@pytest.mark.parametrize("is_retried", [True, False])
async def test_who_shares_a_batch_with_a_request_that_kills(tmp_path: Path, *, is_retried: bool) -> None:
    """It fails alone; or, where the config says that nothing is executed twice, with all of its batch."""
    _write(tmp_path, "steady", 1)
    if not is_retried:
        config = tmp_path / "steady" / "config.pbtxt"
        config.write_text(config.read_text() + 'parameters { key: "RETRY_AFTER_CRASH" value { string_value: "no" } }\n')
    with running_server(tmp_path) as running:
        model = running.server.repository.get("steady", None)
        async with AsyncHttpClient(running) as client:

            def send(value: int) -> asyncio.Task[Answer]:
                return asyncio.create_task(client.infer("steady", {"INPUT0": np.full((1, 1), value, np.int32)}))

            sleeper = send(SLEEP)
            await until(lambda: running.call(lambda: model.inflight == 1 and model.queue_depth == 0), "it is executed")
            values = (1, 2, DIE, 3)
            answers = await asyncio.gather(sleeper, *map(send, values), return_exceptions=True)
        snapshot = running.call(model.statistics.snapshot)
    failed = [isinstance(answer, ClientError) for answer in answers]
    assert failed == [False, *((value == DIE) if is_retried else True for value in values)]
    assert "I die" in str(answers[3])
    assert snapshot.fail.count == sum(failed)
    assert snapshot.success.count == len(failed) - sum(failed)


def test_a_model_that_dies_fails_its_request_with_the_reason_and_comes_back(
    protocol: type[ProtocolClient], tmp_path: Path
) -> None:
    _write(tmp_path, "steady", 1)
    with running_server(tmp_path) as running, protocol(running) as client:
        before = _infer(client, 1)["PID"].item()
        with pytest.raises(ClientError, match=r"(?s)exit.*7.*I die") as died:
            _infer(client, DIE)
        assert died.value.code is ErrorCode.INTERNAL
        assert _infer(client, 2)["PID"].item() != before


@pytest.mark.parametrize("count", [1, 2])
def test_processes_killed_under_load_take_only_what_they_executed(
    tmp_path: Path, children: Children, count: int
) -> None:
    """What is lost says why; nothing else fails; and in the end everything is as before."""
    _write(tmp_path, "steady", count)
    lost: list[ClientError] = []
    lock = threading.Lock()

    def ask(client: ProtocolClient, number: int) -> None:
        try:
            _infer(client, number % 10_000)
        except ClientError as error:
            with lock:
                lost.append(error)

    with (
        running_server(tmp_path) as running,
        traffic(running, (HttpClient, GrpcClient), ask, num_clients=2) as seen,
        HttpClient(running) as client,
    ):
        num_kills = 3
        for _ in range(num_kills):
            before = children()
            assert len(before) == count
            os.kill(next(iter(before)), signal.SIGKILL)
            _wait_for_others(children, before, count)
        pids = Counter(_infer(client, 1)["PID"].item() for _ in range(50))
        assert set(pids) <= children()
    seen.check()
    # Four clients wait for their answers: a batch that is executed holds four requests at most.
    assert len(lost) <= num_kills * 4
    for error in lost:
        assert error.code is ErrorCode.INTERNAL, error
        assert "was killed by signal SIGKILL" in error.message, error


def test_a_healthy_instance_takes_over_from_one_that_keeps_dying(tmp_path: Path, children: Children) -> None:
    _write(tmp_path, "steady", 2)
    with running_server(tmp_path) as running, HttpClient(running) as client:
        doomed, healthy = sorted(children())
        # The more often it dies, the longer the pause before it is started again.
        for _ in range(5):
            os.kill(doomed, signal.SIGKILL)
            _wait_for_others(children, {doomed, healthy}, 2)
            (doomed,) = children() - {healthy}
        os.kill(doomed, signal.SIGKILL)
        until_true(lambda: children() == {healthy}, "it has died once more")
        for number in range(20):
            assert _infer(client, number)["PID"].item() == healthy


def test_reloads_leave_no_process_behind(tmp_path: Path, children: Children) -> None:
    _write(tmp_path, "steady", 1)
    with (
        running_server(tmp_path, model_control_mode="explicit", load_model=("steady",)) as running,
        GrpcClient(running) as control,
        traffic(running, (HttpClient, GrpcClient), lambda client, number: _infer(client, number) and None) as seen,
    ):
        pids = children()
        for _ in range(3):
            (tmp_path / "steady" / "1" / "model.py").touch()
            control.load("steady")
            assert not seen.num_failed, seen.failures
        until_true(lambda: len(children()) == 1, "the processes of the old ones ended")
        assert children() != pids
    seen.check()
