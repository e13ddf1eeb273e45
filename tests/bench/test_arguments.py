"""Command lines, perf_analyzer's among them, and what is said about wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelserver.bench.arguments import parse_arguments, wants_help
from modelserver.bench.flags import make_parser
from modelserver.bench.llm.options import Length, LlmOptions, Target
from modelserver.bench.options import BenchOptions, Mode, SharedMemory
from modelserver.bench.search import LoadRange
from modelserver.bench.work import EndpointType, Sequences
from modelserver.client.address import Address
from modelserver.errors import InvalidArgumentError


def parse(*words: str) -> BenchOptions:
    options = parse_arguments(["-m", "m", *words])
    assert isinstance(options, BenchOptions)
    return options


def test_defaults_are_those_of_perf_analyzer() -> None:
    options = parse()
    assert options.address == Address("localhost", 8000)
    assert parse("-i", "grpc").address.port == 8001
    assert options.load.levels == LoadRange(1)
    measurement = options.measurement
    assert (measurement.interval_s, measurement.window_requests, measurement.max_trials) == (5.0, 50, 10)
    assert (measurement.stability.percentage, measurement.stability.percentile) == (10, None)
    assert options.load.sequences == Sequences(1, None, 20, 20.0)
    assert options.request.data.string_length == 128
    assert options.request.output_region_bytes == 102400


def test_the_environment_says_where_the_server_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As for every other command; a flag says otherwise."""
    monkeypatch.setenv("MODELSERVER_URL", "http://other:9000")
    assert parse().address == Address("other", 9000)
    assert parse("-i", "grpc").address == Address("other", 9000)
    assert parse("-u", "third:1").address == Address("third", 1)
    language = parse_arguments(["-m", "m", "--llm"])
    assert isinstance(language, LlmOptions)
    assert language.address == Address("other", 9000)
    authorities = tmp_path / "ca.pem"
    authorities.touch()
    monkeypatch.setenv("MODELSERVER_URL", "https://other")
    monkeypatch.setenv("MODELSERVER_CA_FILE", str(authorities))
    for protocol in ("http", "grpc"):
        tls = parse("-i", protocol).address.tls
        assert tls is not None
        assert tls.authorities_file == str(authorities)


def test_a_long_command_line() -> None:
    words = """
        -x 3 -u host:1234 -i gRPC --streaming -b 4 --concurrency-range 1:16:5 -p 1000 -s 5 -r 4 -l 20
        --percentile 95 --shape IN:3,4 --shape A:B:2 --measurement-mode count_windows -v -v -a --sync
        --sequence-length 7 --sequence-id-range 5:9 --sequence-length-variation 0 --request-count 12
        --shared-memory system --collect-metrics --metrics-url http://other:99/m --metrics-interval 50
        --grpc-compression-algorithm gzip -H a:b:c --request-parameter n:4:int --binary-search -f o.csv
    """
    options = parse(*words.split())
    assert (options.version, options.address, options.is_streaming) == ("3", Address("host", 1234), True)
    assert options.load.levels == LoadRange(1, 16, 5)
    assert options.load.is_binary
    assert options.measurement.stability.latency_limit_us == 20_000
    assert options.measurement.stability.percentile == 95
    assert options.measurement.counts_requests
    assert options.request.data.shapes == {"IN": (3, 4), "A:B": (2,)}
    assert options.request.headers == {"a": "b:c"}
    assert options.request.parameters == {"n": 4}
    assert options.request.shared_memory is SharedMemory.SYSTEM
    assert options.load.sequences == Sequences(5, 9, 7, 0.0)
    assert (options.metrics.address, options.metrics.path) == (Address("other", 99), "/m")
    assert options.report.verbosity == 2
    assert options.report.csv_file == Path("o.csv")


def test_other_loads(tmp_path: Path) -> None:
    rate = parse("--request-rate-range", "10:20:2.5", "--request-distribution", "poisson").load
    assert (rate.mode, rate.levels, rate.is_poisson) == (Mode.REQUEST_RATE, LoadRange(10, 20, 2.5), True)
    (tmp_path / "gaps").write_text("100\n250.5\n")
    intervals = parse("--request-intervals", str(tmp_path / "gaps")).load
    assert (intervals.mode, intervals.intervals_ns) == (Mode.INTERVALS, (100_000, 250_500))
    periodic = "-i grpc --streaming --profile-export-file e.json --periodic-concurrency-range 1:9:2 --request-period 3"
    assert parse(*periodic.split()).load.mode is Mode.PERIODIC
    assert parse("-t", "5").load.levels == LoadRange(5)


def test_flags_without_effect_are_taken_with_a_note() -> None:
    (note,) = parse("--model-signature-name", "x").notes
    assert note == "--model-signature-name has no effect: it is of TensorFlow Serving"
    assert parse("--trace-file", "t.json").notes == ("--trace-file has no effect: traces are set on the server",)


def test_tls(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("")
    grpc = parse("-i", "grpc", "--ssl-grpc-use-ssl", "--ssl-grpc-root-certifications-file", str(tmp_path / "ca.pem"))
    assert grpc.address.tls is not None
    assert grpc.address.tls.authorities_file == str(tmp_path / "ca.pem")
    http = parse("-u", "https://host:1", "--ssl-https-verify-host", "0")
    assert http.address.tls is not None
    assert not http.address.tls.is_host_verified
    assert parse("--ssl-https-verify-peer", "0").address.tls is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--concurency-range 3", "did you mean '--concurrency-range'"),
        ("-b 0", "at least 1"),
        ("-p x", "whole number"),
        ("-i ftp", "invalid choice"),
        ("--streaming", "add -i grpc"),
        ("--concurrency-range 1:0", "needs --latency-threshold"),
        ("--concurrency-range 1 --request-rate-range 2", "cannot be used together"),
        ("--shape IN", "--shape expects"),
        ("--shape IN:x", "--shape expects"),
        ("-H nothing", "-H expects"),
        ("--request-parameter a:b:float", "--request-parameter expects"),
        ("--percentile 100", "between 0 and 100"),
        ("--sequence-id-range 5:5", "--sequence-id-range expects"),
        ("--request-intervals /no/such/file", "cannot read"),
        ("--input-data zero --input-data random", "JSON files only"),
        ("-i grpc --input-tensor-format json", "is of HTTP"),
        ("--periodic-concurrency-range 1:4", "needs --streaming"),
        ("--service-kind torchserve", "is not there"),
        ("-c 5", "use --concurrency-range"),
        ("-u host:port", "-u expects host:port"),
        ("-u ftp://host", "-u expects host:port"),
        ("--ssl-https-ca-certificates-file /no/such/ca.pem", "no file"),
        ("stray", "unknown argument 'stray'"),
        ("--llm --goodput tft:3", "did you mean 'ttft'"),
        ("--llm --goodput ttft:x", "--goodput expects"),
        ("--llm --input-tokens x", "--input-tokens expects"),
        ("--llm --extra-inputs x", "--extra-inputs expects"),
        ("--llm --num-prompts 0", "at least 1"),
        ("--llm --binary-search --concurrency-range 1:4", "goes through all of it"),
        ("--binary-search --concurrency-range 1:4", "say which with -l"),
        ("--request-rate-range nan", "of numbers, got 'nan'"),
        ("--request-rate-range 1:inf", "of numbers, got '1:inf'"),
        ("-s nan", "at least 0.001"),
        ("--sequence-length-variation inf", "at least 0"),
        ("--grpc-max-frame-size 5", "16384 to 16777215"),
        ("--llm --goodput ttft:nan", "--goodput expects"),
        ("--llm --goodput itl", "--goodput expects"),
        ("--llm --input-tokens nan", "--input-tokens expects"),
        ("--llm --output-tokens 3:inf", "--output-tokens expects"),
        ("--llm -f o.csv", "-f is not of --llm: use --json"),
        ("--llm -i grpc", "prompts go over HTTP"),
        ("--llm --shared-memory system", "prompts are text"),
    ],
)
def test_what_is_wrong_is_named(words: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        parse_arguments(["-m", "m", *words.split()])


def test_a_model_must_be_named() -> None:
    with pytest.raises(InvalidArgumentError, match="-m is missing"):
        parse_arguments([])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host", Address("host", 8000)),
        ("host:5", Address("host", 5)),
        ("http://host:5/", Address("host", 5)),
        ("[::1]:5", Address("::1", 5)),
        ("[::1]", Address("::1", 8000)),
    ],
)
def test_addresses(text: str, expected: Address) -> None:
    assert parse("-u", text).address == expected


@pytest.mark.parametrize("content", [b"100\ninf\n", b"100\nnan\n", b"\xff", b"", b"-1\n", b"0\n"])
def test_intervals_that_are_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "gaps").write_bytes(content)
    with pytest.raises(InvalidArgumentError, match="numbers of microseconds"):
        parse("--request-intervals", str(tmp_path / "gaps"))


def test_flags_of_tensors_are_without_effect_on_prompts() -> None:
    options = parse_arguments(["-m", "m", "--llm", "-p", "1000", "--streaming", "-s", "10"])
    assert isinstance(options, LlmOptions)
    assert options.notes == ("--measurement-interval has no effect: it is not of --llm",)


@pytest.mark.parametrize("words", [["--llm"], ["--service-kind", "openai"]])
def test_language_models(words: list[str]) -> None:
    more = ["--goodput", "ttft:200", "tpot:20", "request_latency:900", "--input-tokens", "50:5", "--output-tokens=0"]
    options = parse_arguments(
        ["-m", "m", *words, "--endpoint-type", "completions", "--endpoint", "v9/x", "--extra-inputs", "a:true", *more]
    )
    assert isinstance(options, LlmOptions)
    assert options.endpoint_type is EndpointType.COMPLETIONS
    assert options.path == "/v9/x"
    assert options.extra == {"a": True}
    assert options.goodput == {Target.TTFT: 200, Target.ITL: 20, Target.LATENCY: 900}
    assert options.prompts.input_tokens == Length(50, 5)
    assert options.prompts.output_tokens is None


def test_the_help_has_every_flag() -> None:
    assert wants_help(["-m", "x", "-h"])
    text = make_parser().format_help()
    for flag in ("--concurrency-range", "--request-rate-range", "--input-data", "--llm", "--html", "--shared-memory"):
        assert flag in text


def test_the_api_key_of_the_environment_is_sent_unless_another_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELSERVER_API_KEY", "msk_1")
    assert parse().request.headers == {"authorization": "Bearer msk_1"}
    assert parse("-H", "X-API-Key: other").request.headers == {"X-API-Key": "other"}
