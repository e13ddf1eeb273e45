"""Files and batches by OpenAI's client: rows, errors, owners, limits, a restart, and the end of time."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import orjson
import pytest
from openai.types import Batch
from support.keys import KeyFile
from support.mock_llm import say, user, write_mock_llm
from support.processes import serving_process
from support.serving import RunningServer, running_server

from modelserver.auth.access import Access
from modelserver.auth.api_keys import Scope
from modelserver.core.request import LOWEST_PRIORITY, InFlightRequest
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.http.proxy_headers import adopt
from modelserver.frontends.llm.errors import ParameterError
from modelserver.frontends.openai.batches.input_file import ENDPOINTS
from modelserver.frontends.openai.batches.records import BatchRecord, BatchStatus, kept
from modelserver.frontends.openai.batches.service import BATCH, BatchService, endpoint_handlers
from modelserver.frontends.openai.multipart import read_form
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import json_response

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FINAL = ("completed", "failed", "expired", "cancelled")
MAX_BYTES = 20_000
HANGS = say(text="one two", hang=1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("batched")
    write_mock_llm(root, "mock")
    return root


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyFile:
    file = KeyFile(tmp_path_factory.mktemp("keys") / "keys.yaml")
    for name in ("ann", "bob"):
        file.add(name, Scope.INFER)
    file.add("scraper", Scope.METRICS)
    return file


@pytest.fixture(scope="module")
def served(models: Path, keys: KeyFile, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    options: dict[str, Any] = {"batch_directory": str(tmp_path_factory.mktemp("state")), "batch_max_bytes": MAX_BYTES}
    with running_server(models, api_keys_file=str(keys.path), **options) as running:
        yield running


@pytest.fixture
def client(served: RunningServer, keys: KeyFile) -> Iterator[openai.OpenAI]:
    with connected(served, keys.texts["ann"]) as ann:
        yield ann
        for file in ann.files.list():
            ann.files.delete(file.id)


def connected(served: RunningServer, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{served.http_url}/v1", api_key=key, max_retries=0)


def line(name: str, prompt: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    asked = {"messages": user(prompt)} if url == CHAT else {"prompt": prompt}
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "mock", **asked, **body}}


def upload(client: openai.OpenAI, lines: list[Any], **more: Any) -> str:
    text = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    return client.files.create(file=("in.jsonl", text.encode()), purpose="batch", **more).id


def begin(client: openai.OpenAI, lines: list[Any], url: Any = COMPLETIONS, **more: Any) -> str:
    created = client.batches.create(input_file_id=upload(client, lines), endpoint=url, completion_window="24h", **more)
    assert created.status == "validating"
    return created.id


def ended(client: openai.OpenAI, batch_id: str) -> Batch:
    return until(client, batch_id, lambda batch: batch.status in FINAL)


def until(client: openai.OpenAI, batch_id: str, is_so: Callable[[Batch], bool]) -> Batch:
    ends_s = time.monotonic() + 30
    while not is_so(batch := client.batches.retrieve(batch_id)):
        assert time.monotonic() < ends_s, batch
        time.sleep(0.01)
    return batch


def rows(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """The rows of a file by the names of their requests, which are all different."""
    assert file_id is not None
    found = [json.loads(row) for row in client.files.content(file_id).text.splitlines()]
    named = {row["custom_id"]: row for row in found}
    assert len(named) == len(found)
    return named


def test_each_line_has_a_row_of_its_answer_or_of_its_error(client: openai.OpenAI) -> None:
    lines = [line("a", "one two", CHAT), line("b", say(refuse="no"), CHAT), line("c", "x", CHAT, model="nothing")]
    batch = ended(client, begin(client, lines, CHAT, metadata={"of": "ann"}))
    assert (batch.status, batch.metadata, batch.model) == ("completed", {"of": "ann"}, "mock")
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 1, 2)
    assert batch.usage is not None
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == (2, 2)
    assert batch.created_at <= (batch.in_progress_at or 0) <= (batch.finalizing_at or 0) <= (batch.completed_at or 0)
    (answered,) = rows(client, batch.output_file_id).values()
    assert (answered["custom_id"], answered["error"]) == ("a", None)
    assert answered["response"]["status_code"] == 200
    assert answered["response"]["body"]["choices"][0]["message"]["content"] == "one two"
    failed = rows(client, batch.error_file_id)
    assert {name: row["response"]["status_code"] for name, row in failed.items()} == {"b": 400, "c": 404}
    assert failed["c"]["response"]["body"]["error"]["code"] == "model_not_found"
    assert client.files.retrieve(batch.output_file_id or "").purpose == "batch_output"


def test_metrics_count_batches_and_their_rows(client: openai.OpenAI, served: RunningServer, keys: KeyFile) -> None:
    def read() -> dict[str, float]:
        headers = {"authorization": f"Bearer {keys.texts['scraper']}"}
        page = httpx.get(f"http://{served.metrics_url}/metrics", headers=headers).text
        starts = ("modelserver_batches", "modelserver_batch_requests")
        found = (each.rpartition(" ") for each in page.splitlines() if each.startswith(starts))
        return {name: float(value) for name, _, value in found}

    before = read()
    batch = ended(client, begin(client, [line("a", "one"), line("b", "x", model="nothing")]))
    assert batch.status == "completed"
    after = read()
    changed = {name: value - before[name] for name, value in after.items() if value != before[name]}
    assert changed == {
        'modelserver_batches{status="completed"}': 1,
        'modelserver_batch_requests_ended_total{result="completed"}': 1,
        'modelserver_batch_requests_ended_total{result="failed"}': 1,
    }


@pytest.mark.parametrize(
    ("url", "body", "kind"),
    [
        (COMPLETIONS, {"prompt": "one"}, "text_completion"),
        ("/v1/responses", {"input": "one"}, "response"),
        ("/v1/embeddings", {"input": "one"}, "list"),
    ],
)
def test_endpoints(client: openai.OpenAI, url: str, body: dict[str, Any], kind: str) -> None:
    asked = {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "mock", **body}}
    batch = ended(client, begin(client, [asked, ""], url))
    assert batch.usage is not None
    assert batch.usage.input_tokens == 1
    assert rows(client, batch.output_file_id)["a"]["response"]["body"]["object"] == kind


@pytest.mark.parametrize(
    ("lines", "codes"),
    [
        ([""], [("empty_file", None)]),
        (["{", "[1]", line("a", "x")], [("invalid_json_line", 1), ("invalid_json_line", 2)]),
        ([line("a", "x"), line("a", "y")], [("duplicate_custom_id", 2)]),
        ([line("a", "x") | {"url": CHAT}], [("mismatched_url", 1)]),
        ([line("a", "x") | {"method": "GET"}], [("invalid_method", 1)]),
        ([line("", "x")], [("invalid_custom_id", 1)]),
        ([{"custom_id": "a"}], [("missing_required_parameter", 1)]),
        ([line("a", "x", stream=True)], [("invalid_request", 1)]),
    ],
)
def test_a_file_that_is_wrong_fails_the_batch(client: openai.OpenAI, lines: list[Any], codes: list[Any]) -> None:
    batch = ended(client, begin(client, lines))
    assert (batch.status, batch.output_file_id) == ("failed", None)
    assert batch.errors is not None
    assert [(error.code, error.line) for error in batch.errors.data or ()] == codes


def test_no_line_asks_for_a_response_in_the_background(client: openai.OpenAI) -> None:
    """Its row would say that it is queued, and no key could read the response."""
    url = "/v1/responses"
    lines = [line(name, "x", url, input="x", background=name == "b") for name in "ab"]
    batch = ended(client, begin(client, lines, url))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [(error.code, error.line, error.param) for error in batch.errors.data or ()] == [
        ("invalid_request", 2, "body.background")
    ]


def test_files_are_listed_read_and_removed(client: openai.OpenAI) -> None:
    after: Any = {"anchor": "created_at", "seconds": 3600}
    first, second = (upload(client, [line("a", "x")], expires_after=after) for _ in range(2))
    file = client.files.retrieve(first)
    assert (file.filename, file.purpose, file.status) == ("in.jsonl", "batch", "processed")
    assert file.expires_at == file.created_at + 3600
    assert client.files.content(first).read() == json.dumps(line("a", "x")).encode()
    assert [each.id for each in client.files.list()] == [second, first]
    assert [each.id for each in client.files.list(limit=1, order="asc")] == [first, second]
    assert client.files.list(purpose="batch_output").data == []
    assert client.files.delete(first).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(first)


def test_what_belongs_to_a_key_is_not_there_for_others(
    served: RunningServer, keys: KeyFile, client: openai.OpenAI
) -> None:
    batch = ended(client, begin(client, [line("a", "x")]))
    with connected(served, keys.texts["bob"]) as other:
        assert other.files.list().data == []
        assert other.batches.list().data == []
        for call in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(batch.output_file_id or "")
        for ask in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(batch.id)
        with pytest.raises(openai.BadRequestError, match="there is no file"):
            other.batches.create(input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h")
    assert batch.id in [each.id for each in client.batches.list(limit=1)]


def test_a_batch_is_cancelled_and_keeps_what_is_answered(client: openai.OpenAI) -> None:
    lines = [line("a", "one", CHAT), line("b", HANGS, CHAT)]
    batch_id = begin(client, lines, CHAT)
    until(client, batch_id, lambda batch: batch.request_counts is not None and batch.request_counts.completed == 1)
    with pytest.raises(openai.BadRequestError, match="in use by the batch"):
        client.files.delete(client.batches.retrieve(batch_id).input_file_id)
    assert client.batches.cancel(batch_id).status == "cancelling"
    batch = ended(client, batch_id)
    assert (batch.status, batch.error_file_id) == ("cancelled", None)
    assert batch.cancelling_at is not None
    assert rows(client, batch.output_file_id).keys() == {"a"}
    with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
        client.batches.cancel(batch_id)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"endpoint": "/v1/videos"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ],
)
def test_wrong_batches_are_refused(client: openai.OpenAI, body: dict[str, Any], param: str) -> None:
    given = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h", **body}
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/batches", body=given, cast_to=object)
    assert refused.value.param == param


def test_wrong_uploads_are_refused(served: RunningServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="'purpose' must be batch"):
        client.files.create(file=b"x", purpose="user_data")
    with pytest.raises(openai.APIStatusError, match="are kept for a key") as refused:
        client.files.create(file=io.BytesIO(b"x" * (MAX_BYTES + 1)), purpose="batch")
    assert refused.value.status_code == 413
    url, headers = f"http://{served.http_url}/v1/files", {"Authorization": f"Bearer {client.api_key}"}
    refusal = httpx.post(url, content=b"{}", headers=headers | {"Content-Type": "application/json"})
    assert refusal.status_code == 400
    assert "multipart/form-data" in refusal.json()["error"]["message"]


def test_forms() -> None:
    kind = "multipart/form-data; boundary=b"
    file = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\nx\r\n--c\r\n\r\ny'
    whole = file + b'\r\n--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n\r\n--b--\r\n'
    form = read_form(whole, kind)
    assert (form["file"].text, form["file"].filename) == ("x\r\n--c\r\n\r\ny", "a.jsonl")
    assert (form["purpose"].text, form["purpose"].filename) == ("", None)
    for cut in range(len(whole) - 3):
        with pytest.raises(ParameterError, match="form"):
            read_form(whole[:cut], kind)
    for other in ("", "text/plain", "multipart/form-data", "multipart/form-data; boundary=other"):
        with pytest.raises(ParameterError, match="form"):
            read_form(whole, other)


def test_a_batch_goes_on_after_a_restart(models: Path, tmp_path: Path) -> None:
    """The rows that were written stay; requests that ran are sent again, and each has one row in the end."""
    options: dict[str, Any] = {"batch_directory": str(tmp_path), "batch_concurrency": 3}
    with running_server(models, **options) as running, connected(running) as client:
        with pytest.raises(InvalidArgumentError, match="another server uses it"), running_server(models, **options):
            pass
        lines = [
            *(line(f"a{number}", "one", CHAT) for number in range(4)),
            line("b", HANGS, CHAT),
            line("c", HANGS, CHAT),
        ]
        batch_id = begin(client, lines, CHAT)
        until(client, batch_id, lambda batch: batch.request_counts is not None and batch.request_counts.completed == 4)
    # A kill may cut the last row.
    (written,) = tmp_path.glob("batches/*.output")
    whole = written.read_bytes()
    written.write_bytes(whole + whole[:25])
    with running_server(models, **options) as running, connected(running) as client:
        counts = until(client, batch_id, lambda batch: batch.in_progress_at is not None).request_counts
        assert counts is not None
        client.batches.cancel(batch_id)
        batch = ended(client, batch_id)
        assert batch.usage is not None
        assert batch.usage.output_tokens == 4
        assert rows(client, batch.output_file_id).keys() == {"a0", "a1", "a2", "a3"}


@pytest.mark.slow
def test_servers_that_are_killed_lose_and_double_no_row(models: Path, tmp_path: Path) -> None:
    """Killed at another moment each time, until one of them finds that the batch has ended."""
    expected = {f"l{number}": str(number) for number in range(400)}
    lines = [line(name, text, CHAT) for name, text in expected.items()]
    batch_id, num_kills = "", 0
    while True:
        with serving_process(models, f"--batch-directory={tmp_path}") as process:
            process.wait_until_started()
            url = f"http://{process.http_url}/v1"
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                batch_id = batch_id or begin(client, lines, CHAT)
                batch = client.batches.retrieve(batch_id)
                if batch.status == "completed":
                    found = rows(client, batch.output_file_id)
                    break
                time.sleep(0.01 * num_kills)
            process.signal(signal.SIGKILL)
            num_kills += 1
    assert num_kills >= 3
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (len(expected), 0)
    contents = {name: row["response"]["body"]["choices"][0]["message"]["content"] for name, row in found.items()}
    assert contents == expected


def test_without_a_directory_all_is_refused(http: httpx.Client) -> None:
    for path in ("/v1/files", "/v1/batches", "/v1/batches/x", "/v1/files/x/content"):
        answer = http.get(path)
        assert answer.status_code == 400
        assert "--batch-directory" in answer.json()["error"]["message"]


def test_every_endpoint_that_a_batch_may_name_has_a_handler() -> None:
    assert endpoint_handlers(cast("Any", None), HttpLimits()).keys() == set(ENDPOINTS)


async def until_so(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - what it waits for has no event
        await asyncio.sleep(0.001)


class Life:
    """A service whose requests a test answers, at a time that the test sets."""

    def __init__(self, directory: Path, concurrency: int = 2) -> None:
        self.now_s = 1_000_000.0
        self.asked: list[HttpExchange] = []
        self.service = BatchService(
            directory,
            self,  # type: ignore[arg-type]  # stands for the data plane, of which the load is asked
            {CHAT: self.asked.append},
            concurrency=concurrency,
            clock=lambda: self.now_s,
        )
        self.num_others = 0

    def load_of(self, _name: str) -> Any:
        num_running = sum(not exchange.answer.done() for exchange in self.asked)  # type: ignore[attr-defined]
        return type("Load", (), {"num_inflight": num_running + self.num_others})

    async def begin(self, num_lines: int) -> BatchRecord:
        text = "\n".join(json.dumps(line(f"l{number}", "x", CHAT)) for number in range(num_lines))
        file = await self.service.add_file("in", BATCH, text.encode(), None)
        return await self.service.add_batch(CHAT, file.id, None, None)

    async def asks(self, count: int) -> None:
        await until_so(lambda: len(self.asked) >= count)

    async def ends(self, record: BatchRecord) -> None:
        await until_so(lambda: record.status.is_final)

    def answer(self, *numbers: int, status: int = 200) -> None:
        for number in numbers:
            self.asked[number].respond(json_response({}, status))

    async def names(self, file_id: str | None) -> list[str]:
        text = bytes(await self.service.content(file_id or ""))
        return [json.loads(row)["custom_id"] for row in text.splitlines()]


@pytest.fixture
async def life(tmp_path: Path) -> Any:
    life = Life(tmp_path)
    await life.service.open()
    life.service.resume()
    yield life
    await life.service.close()


async def test_a_batch_that_expires_keeps_what_is_answered(life: Life) -> None:
    record = await life.begin(3)
    await life.asks(2)
    life.answer(0)
    await life.asks(3)
    life.now_s += 24 * 3600
    await life.service.expire()
    await life.ends(record)
    assert (record.status, record.num_completed, record.num_failed) == ("expired", 1, 2)
    assert await life.names(record.output_file_id) == ["l0"]
    assert await life.names(record.error_file_id) == ["l1", "l2"]
    assert b'"batch_expired"' in bytes(await life.service.content(record.error_file_id or ""))
    life.now_s += 32 * 24 * 3600
    await life.service.expire()
    assert (life.service.files(), life.service.batches()) == ([], [])


async def test_lines_are_few_while_others_use_the_model(tmp_path: Path) -> None:
    life = Life(tmp_path, concurrency=16)
    await life.service.open()
    life.service.resume()
    life.num_others = 1
    record = await life.begin(20)
    await life.asks(2)
    await asyncio.sleep(0.2)
    assert len(life.asked) == 2
    life.num_others = 0
    await life.asks(16)
    assert len(life.asked) == 16

    def has_ended() -> bool:
        life.answer(*range(len(life.asked)))
        return record.status.is_final

    await until_so(has_ended)
    assert len(await life.names(record.output_file_id)) == 20
    await life.service.close()


async def test_a_line_that_finds_the_server_busy_is_sent_again(life: Life) -> None:
    record = await life.begin(1)
    await life.asks(1)
    asked = InFlightRequest(model_name="mock", version=None, inputs={})
    assert adopt(asked, life.asked[0], Access()).priority == LOWEST_PRIORITY
    life.answer(0, status=429)
    await life.asks(2)
    life.answer(1, status=503)
    await life.asks(3)
    life.answer(2)
    await life.ends(record)
    assert (record.status, record.num_completed, record.num_failed) == ("completed", 1, 0)


async def test_a_stop_at_any_moment_loses_and_doubles_no_row(tmp_path: Path) -> None:
    """Each life ends after one more answer, while another request runs."""
    num_lines = 6
    life = Life(tmp_path)
    await life.service.open()
    record = await life.begin(num_lines)
    for num_answered in range(num_lines):
        life.service.resume()
        await life.asks(min(2, num_lines - num_answered))
        life.answer(0)
        await until_so(partial(_has_row, record, num_answered + 1))
        if num_answered + 1 == num_lines:
            await life.ends(record)
        await life.service.close()
        life = Life(tmp_path)
        await life.service.open()
        (record,) = life.service.batches()
    assert (record.status, record.num_completed, record.num_total) == ("completed", num_lines, num_lines)
    assert sorted(await life.names(record.output_file_id)) == [f"l{number}" for number in range(num_lines)]
    await life.service.close()


async def test_files_that_were_about_to_be_published_are_published_by_the_next_life(life: Life, tmp_path: Path) -> None:
    record = await life.begin(1)
    await life.asks(1)
    life.answer(0)
    await life.ends(record)
    await life.service.close()
    # As a kill leaves it between the file's data and its record.
    record.status, record.final = BatchStatus.FINALIZING, BatchStatus.COMPLETED
    (tmp_path / "batches" / f"{record.id}.json").write_bytes(orjson.dumps(kept(record)))
    (tmp_path / "files" / f"{record.output_file_id}.json").unlink()
    again = Life(tmp_path)
    await again.service.open()
    again.service.resume()
    (found,) = again.service.batches()
    await again.ends(found)
    assert await again.names(found.output_file_id) == ["l0"]
    await again.service.close()


def _has_row(record: BatchRecord, number: int) -> bool:
    return record.num_completed == number
