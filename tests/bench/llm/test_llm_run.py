"""`bench --llm` against a server that emits tokens with set delays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.token_server import TokenServer, token_server

from modelserver.bench.program import run


def measure(server: TokenServer, tmp_path: Path, *words: str, status: int = 0) -> dict[str, Any]:
    path = tmp_path / "out.json"
    common = ["--llm", "-m", "llm", "-u", server.url, "--request-count", "6", "--json", str(path)]
    assert run([*common, *words]) == status
    document: dict[str, Any] = json.loads(path.read_text())
    return document


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("chat", "/v1/chat/completions"),
        ("completions", "/v1/completions"),
        ("generate_stream", "/v2/models/llm/generate_stream"),
    ],
)
def test_the_delays_of_the_server_are_what_is_measured(tmp_path: Path, kind: str, path: str) -> None:
    with token_server(first_s=0.05, gap_s=0.01, num_tokens=4) as server:
        document = measure(
            server, tmp_path, "--endpoint-type", kind, "--concurrency-range", "2", "--output-tokens", "4"
        )
        assert {found for found, _ in server.bodies} == {path}
        assert all(body["max_tokens"] == 4 for _, body in server.bodies)
        assert len(server.bodies) == 6
    (level,) = document["levels"]
    assert level["num_requests"] == 6
    # Delays are lower bounds; how far above them a busy machine is, is not ours to say.
    assert level["time_to_first_token_ms"]["min"] >= 49
    assert level["inter_token_latency_ms"]["mean"] >= 8
    assert level["inter_token_latency_ms"]["count"] == 18
    assert level["output_sequence_length"]["mean"] == 4
    assert level["has_usage"] == (kind != "generate_stream")


def test_tokens_are_counted_by_usage_where_events_have_several(tmp_path: Path) -> None:
    with token_server(tokens_per_event=3, num_tokens=4) as server:
        (level,) = measure(server, tmp_path, "--goodput", "ttft:60000", "itl:60000")["levels"]
    assert level["output_sequence_length"]["mean"] == 12
    assert level["input_sequence_length"]["mean"] == 7
    assert level["goodput_share"] == 1.0


def test_an_open_loop_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "o.html"
    with token_server(first_s=0.01, gap_s=0.001) as server:
        words = ["--request-rate-range", "50:100:50", "--request-distribution", "poisson", "--html", str(page)]
        document = measure(server, tmp_path, *words)
    assert [level["num_requests"] for level in document["levels"]] == [6, 6]
    assert "Time to first token" in page.read_text()
    assert "Time to first token (ms)" in capsys.readouterr().out


def test_a_whole_answer_is_one_event(tmp_path: Path) -> None:
    with token_server() as server:
        (level,) = measure(server, tmp_path, "--no-stream", "--endpoint-type", "completions")["levels"]
    assert level["num_requests"] == 6
    assert level["inter_token_latency_ms"]["count"] == 0


@pytest.mark.parametrize(
    ("fault", "words"),
    [({"status": 404}, "HTTP 404: no such model"), ({"breaks_after": 2}, "closed the connection within its answer")],
)
def test_failures_are_loud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: dict[str, int], words: str
) -> None:
    with token_server(**fault) as server:
        (level,) = measure(server, tmp_path, status=1)["levels"]
    assert level["num_failures"] == 6
    assert words in next(iter(level["failures"]))
    assert "6 REQUESTS FAILED" in capsys.readouterr().out
