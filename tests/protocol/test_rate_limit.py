"""Models that share resources, as clients meet them: who executes while another does, and who does not."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
from support.async_clients import AsyncClient
from support.clients import ClientError
from support.gate import BACKEND_DIRECTORY, GatedModel, gate_of, until, write_gated
from support.integrity import check_integrity
from support.model_files import write_model
from support.serving import RunningServer, running_server

from modelserver.errors import ErrorCode

pytestmark = pytest.mark.one_layout


def limited(resource: str, count: int, more: str = "") -> str:
    limiter = f'rate_limiter {{ resources [ {{ name: "{resource}" count: {count} }} ] }}'
    return f"instance_group [ {{ kind: KIND_CPU count: 1 {limiter} }} ] {more}"


MODELS = {
    "first": limited("R", 2),
    "second": limited("R", 2),
    "half": limited("R", 1),
    "sequences": limited("R", 2, "sequence_batching { }"),
}
# In child processes.
CHILDREN = {"child": "", "child_sequences": "sequence_batching { oldest { max_candidate_sequences: 2 } }"}
SOURCE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.echo(request)]) for request in requests]

    def echo(self, request):
        return pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())
"""
CONFIG = """
backend: "gate"
max_batch_size: 4
input [ {{ name: "INPUT0", data_type: TYPE_INT32, dims: [ -1 ] }} ]
output [ {{ name: "OUTPUT0", data_type: TYPE_INT32, dims: [ -1 ] }} ]
{more}
"""


@pytest.fixture(scope="module")
def running(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("limited")
    for name, more in {**MODELS, "hungry": limited("R", 3), "lost": limited("S", 1)}.items():
        write_gated(root, name)
        (root / name / "config.pbtxt").write_text(CONFIG.format(more=more))
    for name, more in CHILDREN.items():
        directory = write_model(root, name, CONFIG.replace('"gate"', '"python"').format(more=limited("R", 2, more)))
        (directory / "1" / "model.py").write_text(SOURCE)
    with running_server(
        root, backend_directory=(BACKEND_DIRECTORY,), rate_limit="execution_count", rate_limit_resource=("R:2",)
    ) as server:
        yield server


@pytest.fixture
async def client(async_protocol: type[AsyncClient], running: RunningServer) -> AsyncIterator[AsyncClient]:
    async with async_protocol(running) as connected:
        yield connected


async def test_who_needs_what_another_has_waits(client: AsyncClient, running: RunningServer) -> None:
    async with GatedModel(running, client, "first") as first, GatedModel(running, client, "second") as second:
        await first.block("a")
        waiting = await second.send("b")
        assert second.gate.batches == []
        first.gate.release()
        await until(lambda: second.gate.batches == [("b",)], "the second executes")
        assert not waiting.done()


async def test_those_who_have_enough_execute_together(client: AsyncClient, running: RunningServer) -> None:
    async with GatedModel(running, client, "first") as first, GatedModel(running, client, "half") as half:
        await half.block("a")
        await first.send("b")
        assert first.gate.batches == []
        half.gate.release()
        await until(lambda: first.gate.batches == [("b",)], "the first executes")


async def test_a_request_that_waits_for_resources_can_leave(client: AsyncClient, running: RunningServer) -> None:
    async with GatedModel(running, client, "first") as first, GatedModel(running, client, "second") as second:
        await first.block("a")
        leaving = await second.send("b")
        leaving.cancel()
        await until(lambda: second.inflight == 0, "the request left")
        first.gate.release()
        later = await first.send("c")
        await later
        assert second.gate.batches == []


@pytest.mark.parametrize("name", CHILDREN)
async def test_a_model_in_a_child_process_waits_as_any_other(
    client: AsyncClient, running: RunningServer, name: str
) -> None:
    limiter = running.server.limiter
    assert limiter is not None
    async with GatedModel(running, client, "first") as first:
        await first.block("a")
        position = {"sequence_id": 9, "sequence_start": True, "sequence_end": True} if "sequences" in name else {}
        infer = client.infer(name, {"INPUT0": np.array([[5]], np.int32)}, **position)
        asked = asyncio.create_task(infer)
        await until(lambda: limiter.num_waiting == 1, "the child's instance waits")
        assert not asked.done()
        first.gate.release()
        assert (await asked).outputs["OUTPUT0"].tolist() == [[5]]
    await until(lambda: limiter.num_waiting == 0, "nobody waits")
    check_integrity(limiter)


async def test_all_are_answered_however_they_contend(client: AsyncClient, running: RunningServer) -> None:
    for name in MODELS:
        gate_of(name).release()
    tasks = []
    for number in range(60):
        name = ("first", "second", "half")[number % 3]
        inputs = {"INPUT0": np.array([[number]], np.int32)}
        tasks.append(asyncio.create_task(client.infer(name, inputs)))
    for number in range(5):
        position = {"sequence_id": 7, "sequence_start": number == 0, "sequence_end": number == 4}
        inputs = {"INPUT0": np.array([[number]], np.int32)}
        answer = await client.infer("sequences", inputs, **position)
        assert answer.outputs["OUTPUT0"].tolist() == [[number]]
    answers = await asyncio.gather(*tasks)
    assert [answer.outputs["OUTPUT0"].tolist() for answer in answers] == [[[number]] for number in range(60)]
    limiter = running.server.limiter
    assert limiter is not None
    check_integrity(limiter)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hungry", '"R" is limited to 2 which will prevent scheduling .* minimum required count is 3'),
        ("lost", '"S" is limited to 0'),
    ],
)
async def test_a_model_that_could_never_execute_does_not_load(
    client: AsyncClient, running: RunningServer, name: str, message: str
) -> None:
    with pytest.raises(ClientError) as caught:
        await client.infer(name, {"INPUT0": np.array([[1]], np.int32)})
    assert caught.value.code in (ErrorCode.UNAVAILABLE, ErrorCode.INVALID_ARGUMENT)
    [row] = [row for row in running.call(lambda: running.server.repository.index()) if row.name == name]
    assert re.search(message, row.reason)


async def test_metrics_tell_what_is_used(client: AsyncClient, running: RunningServer) -> None:
    async with GatedModel(running, client, "half") as half, GatedModel(running, client, "first") as first:
        await half.block("a")
        await first.send("b")
        limiter = running.server.limiter
        assert limiter is not None
        await until(lambda: limiter.num_waiting == 1, "the first waits")
        page = await asyncio.to_thread(_read, f"http://{running.metrics_url}/metrics")
        half.gate.release()
    assert 'modelserver_resource_capacity{device="0",resource="R"} 2' in page
    assert 'modelserver_resource_used{device="0",resource="R"} 1' in page
    assert "modelserver_resource_waiting_instances 1" in page


def _read(url: str) -> str:
    with urllib.request.urlopen(url) as answer:
        text: str = answer.read().decode()
    return text
