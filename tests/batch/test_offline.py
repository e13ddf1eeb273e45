"""`modelserver batch`: every row once, in its part, whatever happens to the workers."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from support.cloud import S3Server, s3_server
from support.mock_llm import user, write_mock_llm
from support.processes import ENVIRONMENT
from support.waiting import until_true

from modelserver.batch.concurrency import Concurrency
from modelserver.batch.engine import Ending, Run, RunOptions
from modelserver.batch.job import Job
from modelserver.batch.plan import BatchOptions, prepared
from modelserver.batch.targets import ProcessTarget, ServerTarget, Target
from modelserver.client.endpoint import endpoint_at
from modelserver.errors import InvalidArgumentError

CHAT = "/v1/chat/completions"


def write_rows(path: Path, num_rows: int) -> list[dict[str, Any]]:
    rows = [{"id": number, "x": [number, 0.1], "factor": 2.0} for number in range(num_rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def server(url: str) -> Target:
    return ServerTarget(endpoint_at(url, is_grpc=False), 60.0)


def answered(target: Target, options: RunOptions | None = None, **rest: Any) -> tuple[Ending, Job, Run]:
    """Run a job to its end."""
    return asyncio.run(worker(target, options, **rest))


async def worker(target: Target, options: RunOptions | None = None, **rest: Any) -> tuple[Ending, Job, Run]:
    await target.start()
    try:
        job, run = await prepared(BatchOptions(**rest), target, Concurrency(16), options or RunOptions())
        return await run.run(), job, run
    finally:
        await target.stop()


def at_once(workers: list[Coroutine[Any, Any, tuple[Ending, Job, Run]]]) -> list[tuple[Ending, Job, Run]]:
    async def gather() -> list[tuple[Ending, Job, Run]]:
        return await asyncio.gather(*workers)

    return asyncio.run(gather())


def lines(directory: Path, pattern: str = "part-*.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(directory.glob(pattern)) for line in path.read_text().splitlines()]


SCALE = {"model": "scale", "pairs": ["factor=k"], "rows_per_shard": 100}


def test_every_row_has_its_outputs_in_order(url: str, tmp_path: Path, out: Path) -> None:
    rows = write_rows(tmp_path / "in.jsonl", 250)
    ending, job, run = answered(server(url), inputs=[str(tmp_path / "*.jsonl")], output=str(out), **SCALE)
    assert (ending, run.num_answered, run.num_failed) == (Ending.COMPLETED, 250, 0)
    assert lines(out) == [
        row | {"y": [2.0 * row["x"][0], 0.2], "total": pytest.approx(2 * row["id"] + 0.2)} for row in rows
    ]
    assert len(list(out.glob("part-*"))) == len(job.manifest.shards) == 3
    assert json.loads((out / "_manifest.json").read_text())["state"] == "completed"
    again, _, run = answered(server(url), inputs=[str(tmp_path)], output=str(out), **SCALE)
    assert (again, run.num_answered) == (Ending.COMPLETED, 0)
    with pytest.raises(InvalidArgumentError, match="other inputs, options"):
        answered(server(url), inputs=[str(tmp_path)], output=str(out), **(SCALE | {"dropped": ["id"]}))


def test_rows_that_fail_are_in_errors_and_do_not_fail_others(url: str, tmp_path: Path, out: Path) -> None:
    """Also where several rows share a request."""
    content = ['{"x": [1, 2], "factor": 3}'] * 40
    content[7] = '{"x": [1, 2], "factor": 13}'
    content[20] = '{"x": [1, 2, 3], "factor": 3}'
    content[21] = "nonsense"
    content[22] = '{"x": [1, 2]}'
    (tmp_path / "in.jsonl").write_text("\n".join(content))
    options = {"inputs": [str(tmp_path / "in.jsonl")], "output": str(out), **SCALE}
    ending, _, run = answered(server(url), RunOptions(rows_per_request=8), **options)
    assert (ending, run.num_answered, run.num_failed) == (Ending.COMPLETED, 36, 4)
    errors = lines(out / "errors")
    assert [(each["row"], each["error"]["code"]) for each in errors] == [
        (7, "400"),
        (20, "invalid_row"),
        (21, "invalid_row"),
        (22, "invalid_row"),
    ]
    assert "unlucky" in errors[0]["error"]["message"]
    assert "shape [2] expected, got [3]" in errors[1]["error"]["message"]
    options["output"] = str(tmp_path / "second")
    ending, _, _ = answered(server(url), RunOptions(max_failed=2), **options)
    assert ending is Ending.TOO_MANY_FAILED


def test_tables_become_parquet(url: str, tmp_path: Path, out: Path) -> None:
    (tmp_path / "in.csv").write_text('id,sentence\na,one\nb,"two, \n2"\n')
    options: dict[str, Any] = {"model": "shout", "pairs": ["sentence=text", "loud=answer"]}
    answered(server(url), inputs=[str(tmp_path / "in.csv")], output=str(out), format="parquet", **options)
    expected = [
        {"id": "a", "sentence": "one", "answer": "ONE"},
        {"id": "b", "sentence": "two, \n2", "answer": "TWO, \n2"},
    ]
    assert pq.read_table(out / "part-00000.parquet").to_pylist() == expected
    second = tmp_path / "second"
    options["pairs"] = ["sentence=text"]
    options |= {"dropped": ["answer"], "binary": ["loud"], "format": "parquet"}
    answered(server(url), inputs=[str(out)], output=str(second), **options)
    assert pq.read_table(second)["loud"].to_pylist() == [b"ONE", b"TWO, \n2"]


def test_columns_are_compared_with_the_model_before_the_first_row(url: str, tmp_path: Path, out: Path) -> None:
    write_rows(tmp_path / "in.jsonl", 3)
    options = {"inputs": [str(tmp_path / "in.jsonl")], "output": str(out), "model": "scale"}
    with pytest.raises(InvalidArgumentError, match=r"there is no column 'k': say which one it is by --map COLUMN=k"):
        answered(server(url), **options)
    with pytest.raises(InvalidArgumentError, match="--map expects COLUMN=INPUT or OUTPUT=COLUMN, got 'a=b'"):
        answered(server(url), pairs=["a=b"], **options)
    with pytest.raises(InvalidArgumentError, match="'id' is a column of the input and of an output"):
        answered(server(url), pairs=["factor=k", "y=id"], **options)
    assert not out.exists()


def write_requests(path: Path, num_rows: int) -> None:
    bodies: list[dict[str, Any]] = [{"model": "mock", "messages": user(f"one {number}")} for number in range(num_rows)]
    bodies[3]["model"] = "absent"
    path.write_text(
        "".join(
            json.dumps({"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body}) + "\n"
            for number, body in enumerate(bodies)
        )
    )


@pytest.mark.parametrize("place", ["server", "process"])
def test_requests_in_openais_shape(url: str, tmp_path: Path, out: Path, place: str) -> None:
    write_requests(tmp_path / "in.jsonl", 12)
    write_mock_llm(tmp_path / "models", "mock")
    target = server(url) if place == "server" else ProcessTarget({"model_repository": (str(tmp_path / "models"),)})
    ending, _, run = answered(target, inputs=[str(tmp_path / "in.jsonl")], output=str(out))
    assert (ending, run.num_answered, run.num_failed) == (Ending.COMPLETED, 11, 1)
    rows = lines(out)
    assert [row["custom_id"] for row in rows] == [f"r{number}" for number in range(12) if number != 3]
    assert rows[0]["response"]["status_code"] == 200
    assert rows[0]["response"]["body"]["choices"][0]["message"]["content"].strip() == "one 0"
    (error,) = lines(out / "errors")
    assert (error["custom_id"], error["response"]["status_code"]) == ("r3", 404)
    assert "absent" in error["response"]["body"]["error"]["message"]


def test_workers_share_a_job(url: str, tmp_path: Path, out: Path) -> None:
    write_rows(tmp_path / "in.jsonl", 300)
    options = {"inputs": [str(tmp_path / "in.jsonl")], "output": str(out), **SCALE, "rows_per_shard": 20}
    answered(server(url), share=(0, 15), **options)  # so that the manifest is there
    shares: tuple[tuple[int, int] | None, ...] = (None, None, (0, 2), (1, 2))
    results = at_once([worker(server(url), share=share, **options) for share in shares])
    assert [row["id"] for row in lines(out)] == list(range(300))
    assert sum(run.num_answered for _, _, run in results) == 280
    assert all(ending is Ending.COMPLETED for ending, _, _ in results[:2])


# Processes.


def command(url: str, source: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    arguments = ["batch", str(source), f"--output={out}", "--model=scale", f"--url={url}", "--map=factor=k"]
    arguments += ["--rows-per-shard=100", "--flush=0.05", "--concurrency=4", "--json", *more]
    return subprocess.Popen(
        [sys.executable, "-m", "modelserver.cli.main", *arguments], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )


def has_progress(out: Path) -> bool:
    return any(out.glob("_state/*/*.progress")) or any(out.glob("_state/*/done"))


def files(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*part-*")}


def kill_and_compare(url: str, tmp_path: Path, num_rows: int, num_kills: int) -> None:
    """Kill the command at random moments, and compare its parts with those of one that was left alone."""
    source = tmp_path / "in.jsonl"
    rows = write_rows(source, num_rows)
    rows[3]["factor"] = 13
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    randomly, out, calm = random.Random(num_kills), tmp_path / "out", tmp_path / "calm"
    undisturbed = command(url, source, calm)
    undisturbed.communicate(timeout=60)
    assert undisturbed.returncode == 0
    for _ in range(num_kills):
        started = command(url, source, out)
        until_true(partial(has_progress, out), "progress")
        try:
            started.communicate(timeout=randomly.random() / 2)
        except subprocess.TimeoutExpired:
            started.kill()
            started.communicate()
    last = command(url, source, out)
    result = json.loads(last.communicate(timeout=60)[0])
    assert last.returncode == 0
    assert files(out) == files(calm)
    assert len(lines(out)) == num_rows - 1
    assert result["total_answered"] == num_rows - 1
    assert result["answered"] < num_rows


def test_kills_lose_no_row_and_double_none(url: str, tmp_path: Path) -> None:
    kill_and_compare(url, tmp_path, 900, 2)


@pytest.mark.slow
def test_many_kills_lose_no_row_and_double_none(url: str, tmp_path: Path) -> None:
    kill_and_compare(url, tmp_path, 12_000, 30)


def test_sigterm_ends_in_order_and_is_continued(url: str, tmp_path: Path, out: Path) -> None:
    source = tmp_path / "in.jsonl"
    write_rows(source, 20_000)
    started = command(url, source, out)
    until_true(partial(has_progress, out), "progress")
    started.send_signal(signal.SIGTERM)
    result = json.loads(started.communicate(timeout=30)[0])
    assert started.returncode == 75
    assert result["state"] == "stopped"
    assert 0 < result["answered"] < 20_000
    assert not list(out.glob("_state/*/claim.*"))


def test_a_server_out_of_reach_is_tried_again_later(tmp_path: Path, out: Path) -> None:
    write_rows(tmp_path / "in.jsonl", 3)
    started = command("127.0.0.1:1", tmp_path / "in.jsonl", out)
    started.communicate(timeout=30)
    assert started.returncode == 75


# Object stores.


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    for name, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    with s3_server() as server:
        yield server


@pytest.mark.filterwarnings("default::DeprecationWarning", "default::ResourceWarning")
def test_from_and_to_an_object_store(s3: S3Server, url: str, tmp_path: Path) -> None:
    """Two workers at a time, whose claims the store keeps apart."""
    write_rows(tmp_path / "in.jsonl", 40)
    s3.write("data/in.jsonl", (tmp_path / "in.jsonl").read_bytes())
    top = f"s3://http://{s3.address}/bucket"
    options = {"inputs": [f"{top}/data"], "output": f"{top}/answers", **SCALE, "rows_per_shard": 20}
    results = at_once([worker(server(url), **options) for _ in range(2)])
    assert {ending for ending, _, _ in results} == {Ending.COMPLETED}
    assert sum(run.num_answered for _, _, run in results) == 40
    found = s3.client.list_objects_v2(Bucket="bucket", Prefix="answers/part-")["Contents"]
    parts = [s3.client.get_object(Bucket="bucket", Key=each["Key"])["Body"].read() for each in found]
    assert [json.loads(line)["id"] for part in parts for line in part.splitlines()] == list(range(40))
