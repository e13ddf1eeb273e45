"""The bench as users run it, against a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from support.certificates import Authority
from support.model_files import write_identity
from support.serving import RunningServer, running_server

from modelserver.bench.program import run
from modelserver.errors import InvalidArgumentError, NotFoundError, UnavailableError

QUICK = ("-p", "100", "-s", "1000", "-r", "3")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, model_repository: Path) -> Iterator[RunningServer]:
    own = tmp_path_factory.mktemp("bench")
    write_identity(own, "echo", data_type="TYPE_INT32")
    write_identity(own, "words", data_type="TYPE_STRING")
    write_identity(own, "slow", execute_delay_ms=20)
    with running_server((own, model_repository)) as running:
        yield running


def where(target: RunningServer, transport: str) -> list[str]:
    if transport == "http":
        return ["-u", target.http_url]
    return ["-u", target.grpc_url, "-i", "grpc", *(["--streaming"] if transport == "stream" else [])]


def measure(target: RunningServer, tmp_path: Path, *words: str, transport: str = "http", status: int = 0) -> Any:
    path = tmp_path / "out.json"
    assert run([*where(target, transport), *QUICK, "--json", str(path), *words]) == status
    return json.loads(path.read_text())


def test_the_version_needs_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"modelserver {metadata.version('modelserver-py')}\n"


@pytest.mark.parametrize("transport", ["http", "grpc", "stream"])
@pytest.mark.parametrize(
    ("model", "words"),
    [("digits_onnx", ["-b", "2"]), ("identity", ["--shape", "INPUT0:16"])],
    ids=["digits", "identity"],
)
def test_client_and_server_agree_on_what_was_done(
    target: RunningServer, tmp_path: Path, transport: str, model: str, words: list[str]
) -> None:
    document = measure(
        target, tmp_path, "-m", model, *words, "--request-count", "200", "--concurrency-range", "8", transport=transport
    )
    (level,) = document["levels"]
    batch = document["batch_size"]
    assert level["num_requests"] == level["server"]["success_count"] == 200
    assert level["server"]["inference_count"] == 200 * batch
    assert level["num_failures"] == 0
    assert 0 < level["latency"]["p50_us"] <= level["latency"]["p99_us"]
    assert level["latency"]["mean_us"] >= level["server"]["request_us"]


def test_windows_sweep_concurrencies_and_write_everything(
    target: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / name for name in ("o.csv", "e.json", "p.html")}
    document = measure(
        target,
        tmp_path,
        *("-m", "identity", "--shape", "INPUT0:4", "--concurrency-range", "1:5:4", "-v", "--price-per-hour=3.6"),
        *("-f", str(files["o.csv"]), "--profile-export-file", str(files["e.json"]), "--html", str(files["p.html"])),
    )
    assert [level["value"] for level in document["levels"]] == [1, 5]
    out = capsys.readouterr().out
    assert out.startswith("*** Measurement Settings ***")
    assert "  Pass [3] throughput: " in out
    assert "Concurrency: 5, throughput: " in out
    for level in document["levels"]:
        assert level["cost_per_million_inferences"] == pytest.approx(1000 / level["throughput"])
        assert f"Cost per million inferences: {level['cost_per_million_inferences']:.4g} at 3.6 per hour" in out
    assert len(files["o.csv"].read_text().splitlines()) == 3
    experiments = json.loads(files["e.json"].read_text())["experiments"]
    assert [one["experiment"]["value"] for one in experiments] == [1, 5]
    assert all(len(one["requests"]) >= 10 for one in experiments)
    assert "<svg" in files["p.html"].read_text()


@pytest.mark.parametrize("transport", ["http", "grpc", "stream"])
def test_an_open_loop_has_the_rate_that_was_asked_for(target: RunningServer, tmp_path: Path, transport: str) -> None:
    document = measure(
        target,
        tmp_path,
        *("-m", "echo", "--shape", "INPUT0:4", "--request-rate-range", "200", "--request-count", "100"),
        transport=transport,
    )
    (level,) = document["levels"]
    assert level["num_requests"] == 100
    # A hundred requests at 200/s take half a second; a busy machine may take longer, never less.
    assert level["duration_s"] > 0.49


def test_a_slow_server_makes_an_open_loop_open_more_connections(target: RunningServer, tmp_path: Path) -> None:
    """One request at a time, 20 ms each: at 100/s the queue grows, and so do latencies, from the time they were due."""
    words = ["-m", "slow", "--shape", "INPUT0:1", "--request-rate-range", "200", "--request-count", "60"]
    (level,) = measure(target, tmp_path, *words)["levels"]
    assert level["num_requests"] == 60
    assert level["latency"]["max_us"] > 100_000


def test_intervals_of_a_file(target: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "gaps").write_text("1000\n9000\n")
    words = [
        "-m",
        "echo",
        "--shape",
        "INPUT0:4",
        "--request-intervals",
        str(tmp_path / "gaps"),
        "--request-count",
        "20",
    ]
    (level,) = measure(target, tmp_path, *words)["levels"]
    assert level["value"] == 200
    assert level["duration_s"] > 0.08


@pytest.mark.parametrize("transport", ["http", "grpc", "stream"])
def test_answers_are_compared_with_what_the_data_expects(target: RunningServer, tmp_path: Path, transport: str) -> None:
    data = {
        "data": [{"INPUT0": {"content": [value], "shape": [1]}} for value in (5, 6, 7)],
        "validation_data": [{"OUTPUT0": [5]}, {"OUTPUT0": [6]}, {"OUTPUT0": [99]}],
    }
    (tmp_path / "data.json").write_text(json.dumps(data))
    words = ["-m", "echo", "--input-data", str(tmp_path / "data.json"), "--request-count", "9"]
    (level,) = measure(target, tmp_path, *words, transport=transport, status=1)["levels"]
    assert level["num_requests"] == 6
    ((text, count),) = level["failures"].items()
    assert count == 3
    assert "output 'OUTPUT0' is not what validation_data says" in text


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_strings(target: RunningServer, tmp_path: Path, transport: str) -> None:
    words = ["-m", "words", "--shape", "INPUT0:3", "--string-length", "50", "--request-count", "10"]
    assert measure(target, tmp_path, *words, transport=transport)["levels"][0]["num_requests"] == 10


def test_json_tensors_and_headers(target: RunningServer, tmp_path: Path) -> None:
    words = ["-m", "echo", "--shape", "INPUT0:3", "--input-tensor-format", "json", "--output-tensor-format", "json"]
    document = measure(
        target, tmp_path, *words, "-H", "X-One: 1", "--request-count", "10", "--warmup-request-count", "5"
    )
    assert document["levels"][0]["num_requests"] == 10


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_messages(target: RunningServer, tmp_path: Path, algorithm: str) -> None:
    words = ["-m", "echo", "--shape", "INPUT0:3000", "--grpc-compression-algorithm", algorithm, "--request-count", "10"]
    assert measure(target, tmp_path, *words, transport="grpc")["levels"][0]["num_requests"] == 10


def test_large_tensors(target: RunningServer, tmp_path: Path) -> None:
    words = ["-m", "echo", "--shape", "INPUT0:300000", "--request-count", "6", "--concurrency-range", "2"]
    for transport in ("http", "grpc", "stream"):
        assert measure(target, tmp_path, *words, transport=transport)["levels"][0]["num_requests"] == 6


def test_several_processes_share_the_load(target: RunningServer, tmp_path: Path) -> None:
    words = [
        "-m",
        "echo",
        "--shape",
        "INPUT0:4",
        "--concurrency-range",
        "5",
        "--max-threads",
        "2",
        "--request-count",
        "51",
    ]
    document = measure(target, tmp_path, *words)
    assert document["num_workers"] == 2
    assert document["levels"][0]["num_requests"] == 51


def test_count_windows_and_binary_search(target: RunningServer, tmp_path: Path) -> None:
    words = ["-m", "slow", "--shape", "INPUT0:1", "--binary-search", "--concurrency-range", "1:4", "-l", "5"]
    document = measure(target, tmp_path, *words)
    # Already the first level is over the limit: 20 ms.
    assert [level["value"] for level in document["levels"]] == [1]


def test_json_on_standard_output_leaves_the_text_to_standard_error(
    target: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["-m", "echo", "--shape", "INPUT0:4", "--request-count", "5", "--json"]
    assert run([*where(target, "http"), *words]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["levels"][0]["num_requests"] == 5
    assert "Request count: 5" in captured.err


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_mistakes_are_told_before_anything_is_measured(
    target: RunningServer, capsys: pytest.CaptureFixture[str], transport: str
) -> None:
    at = where(target, transport)
    with pytest.raises(NotFoundError, match="did you mean 'identity'"):
        run([*at, "-m", "identty"])
    with pytest.raises(InvalidArgumentError, match="--shape INPUT0:16"):
        run([*at, "-m", "identity"])
    with pytest.raises(InvalidArgumentError, match="max_batch_size 8"):
        run([*at, "-m", "echo", "--shape", "INPUT0:1", "-b", "9"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("words", [["-u", "127.0.0.1:1"], ["-u", "127.0.0.1:1", "-i", "grpc"]])
def test_nobody_answers(words: list[str]) -> None:
    with pytest.raises(UnavailableError, match=r"no server answers at (http://)?127\.0\.0\.1:1"):
        run(["-m", "m", *words])


@pytest.mark.parametrize("transport", ["http", "grpc", "stream"])
def test_a_benchmark_of_errors_says_so_and_fails(
    target: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], transport: str
) -> None:
    """The parameter is refused by the server, request by request."""
    words = ["-m", "echo", "--shape", "INPUT0:4", "--request-parameter", "timeout:x:string", "--request-count", "7"]
    (level,) = measure(target, tmp_path, *words, transport=transport, status=1)["levels"]
    assert level["num_failures"] == 7
    assert level["num_requests"] == 0
    assert "7 REQUESTS FAILED" in capsys.readouterr().out


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    assert "--concurrency-range" in capsys.readouterr().out


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_encrypted_connections(tmp_path: Path, transport: str) -> None:
    authority = Authority(tmp_path)
    pair = authority.pair("server")
    write_identity(tmp_path / "models", "echo", data_type="TYPE_INT32")
    files = {"tls_cert": str(pair.certificate), "tls_key": str(pair.key)}
    with running_server(tmp_path / "models", **files) as target:
        if transport == "http":
            url = "https://" + target.http_url
            words = ["-u", url, "--ssl-https-ca-certificates-file", str(authority.certificate)]
        else:
            words = ["-u", target.grpc_url, "-i", "grpc", "--ssl-grpc-use-ssl"]
            words += ["--ssl-grpc-root-certifications-file", str(authority.certificate)]
        common = ["-m", "echo", "--shape", "INPUT0:4", "--request-count", "20", "--concurrency-range", "4"]
        assert run([*words, *common]) == 0
        with pytest.raises(UnavailableError, match="no TLS with"):
            run([*words[:2], *(["-i", "grpc", "--ssl-grpc-use-ssl"] if transport == "grpc" else []), *common])


def test_metrics_are_collected_from_a_server_without_gpus(target: RunningServer, tmp_path: Path) -> None:
    words = ["-m", "echo", "--shape", "INPUT0:4", "--collect-metrics", "--metrics-url", target.metrics_url + "/metrics"]
    (level,) = measure(target, tmp_path, *words, "--metrics-interval", "20")["levels"]
    assert level["gpu"]["utilization"] == {}
    with pytest.raises(UnavailableError, match="--metrics-url says where"):
        run([*where(target, "http"), *words[:5], "--metrics-url", "127.0.0.1:1"])
