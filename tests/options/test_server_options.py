"""The options' table, and the four sources of their values."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from modelserver.auth.access import ApiGroup
from modelserver.errors import InvalidArgumentError
from modelserver.options.server_options import ServerOptions
from modelserver.options.sources import resolve_options, unknown_variables
from modelserver.options.table import deprecated, ineffective, ineffective_metrics_settings, markdown, option_table
from modelserver.telemetry.trace_settings import TraceSettings


def options_of(*arguments: str, **environment: str) -> ServerOptions:
    return resolve_options(arguments, environment).options


# Every flag of Triton's command line, so that none is lost from the table.
TRITON_FLAGS = """
id exit-timeout-secs log-verbose log-info log-warning log-error log-format log-file model-store model-repository
exit-on-error disable-auto-complete-config strict-readiness model-control-mode repository-poll-secs load-model
model-config-name model-load-thread-count model-load-retry-count model-namespacing enable-peer-access allow-http
http-address http-port reuse-http-port http-header-forward-pattern http-thread-count http-max-input-size
http-restricted-api allow-grpc grpc-address grpc-port reuse-grpc-port grpc-header-forward-pattern
grpc-infer-thread-count grpc-infer-allocation-pool-size grpc-max-response-pool-size grpc-use-ssl grpc-use-ssl-mutual
grpc-server-cert grpc-server-key grpc-root-cert grpc-infer-response-compression-level grpc-keepalive-time
grpc-keepalive-timeout grpc-keepalive-permit-without-calls grpc-http2-max-pings-without-data
grpc-http2-min-recv-ping-interval-without-data grpc-http2-max-ping-strikes grpc-max-connection-age
grpc-max-connection-age-grace grpc-restricted-protocol allow-sagemaker sagemaker-port sagemaker-safe-port-range
sagemaker-thread-count allow-vertex-ai vertex-ai-port vertex-ai-thread-count vertex-ai-default-model allow-metrics
allow-gpu-metrics allow-cpu-metrics metrics-address metrics-port metrics-interval-ms metrics-config trace-config
backend-directory backend-config repoagent-directory cache-config cache-directory rate-limit rate-limit-resource
pinned-memory-pool-byte-size cuda-memory-pool-byte-size cuda-virtual-address-size min-supported-compute-capability
buffer-manager-thread-count host-policy model-load-gpu-limit allow-client-shm strict-model-config
response-cache-byte-size trace-file trace-level trace-rate trace-count trace-log-frequency
""".split()  # noqa: SIM905 - a list literal would be a line per flag


@pytest.mark.parametrize("name", TRITON_FLAGS)
def test_every_flag_of_triton_is_known(name: str) -> None:
    names = {alias for option in option_table() for alias in (option.name, *option.flag.aliases)}
    assert name.replace("-", "_") in names


def test_the_table_is_the_dataclass() -> None:
    assert [option.name for option in option_table()] == [entry.name for entry in fields(ServerOptions)]
    assert all(option.flag.help.endswith(".") for option in option_table())


@pytest.mark.parametrize("option", option_table(), ids=lambda option: option.name)
def test_every_default_is_a_value_that_its_flag_accepts(option: object) -> None:
    assert isinstance(option, type(option_table()[0]))
    if option.default in (None, "", ()):
        return
    written = str(option.default).lower() if option.kind is bool else str(option.default)
    assert option.parse(written, source=option.flag_name) == option.default


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--allow-http"], True),
        (["--allow-http=false"], False),
        (["--allow-http=0"], False),
        (["--allow-http", "no"], False),
        (["--allow-http", "OFF"], False),
        (["--allow-http", "1"], True),
        (["--allow-http=yes"], True),
        (["--allow-http=on"], True),
        (["--allow_http=False"], False),
        (["--allow-http=false", "--allow-http=true"], True),
    ],
)
def test_booleans_take_all_of_tritons_forms(arguments: list[str], expected: bool) -> None:
    assert options_of(*arguments).allow_http is expected


@pytest.mark.parametrize(("word", "expected"), [("true", 1), ("false", 0), ("2", 2), ("1", 1)])
def test_the_verbose_level_may_be_a_switch_as_in_tritons_scripts(word: str, expected: int) -> None:
    assert options_of(f"--log-verbose={word}").log_verbose == expected


def test_a_boolean_flag_does_not_swallow_the_next_word() -> None:
    options = options_of("--allow-http", "models", "--strict-readiness", "--http-port", "9")
    assert options.model_repository == ("models",)
    assert options.http_port == 9


def test_values_come_after_an_equals_sign_or_as_the_next_word() -> None:
    options = options_of("--http-port", "1234", "--grpc-port=0", "--metrics-address", "::1", "--trace-count", "-1")
    assert (options.http_port, options.grpc_port, options.metrics_address) == (1234, 0, "::1")
    assert options.trace_count == -1


def test_repeated_flags_collect_in_order_and_the_old_name_counts() -> None:
    options = options_of("--model-store=a", "--model-repository", "b", "c")
    assert options.model_repository == ("a", "b", "c")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--http-prot=1"], ["unknown flag '--http-prot'", "did you mean '--http-port'"]),
        (["--model-repositry", "x"], ["did you mean '--model-repository'"]),
        (["-p"], ["unknown flag '-p'"]),
        (["--http-port=many"], ["--http-port", "an integer from 0 to 65535", "'many'"]),
        (["--http-port=65536"], ["--http-port", "65535", "'65536'"]),
        (["--http-port"], ["--http-port", "got nothing"]),
        (["--http-port", "--allow-http"], ["--http-port", "got nothing"]),
        (["--allow-http=maybe"], ["--allow-http", "true or false", "'maybe'"]),
        (["--model-control-mode=auto"], ["none, poll, explicit", "'auto'"]),
        (["--backend-config=onnxruntime"], ["--backend-config", "<setting>=<value>", "'onnxruntime'"]),
        (["--metrics-config=x"], ["--metrics-config", "<setting>=<value>"]),
        (
            ["--metrics-config=counter_latency=1"],
            [
                "--metrics-config",
                "counter_latencies, histogram_latencies, summary_latencies, summary_quantiles",
                "'counter_latency'",
                "did you mean 'counter_latencies'?",
            ],
        ),
        (["--metrics-config=counter_latencies=maybe"], ["counter_latencies", "true or false", "'maybe'"]),
        (["--cuda-memory-pool-byte-size=64"], ["--cuda-memory-pool-byte-size", "GPU:BYTES", "'64'"]),
        (["--cuda-virtual-address-size=0:-1"], ["--cuda-virtual-address-size", "GPU:BYTES", "'0:-1'"]),
        (["--load-model=a"], ["'--load-model' requires setting '--model-control-mode=explicit'"]),
        (["a", "b", "--model-name=m"], ["--model-name needs a single --model-repository"]),
        (["--config=/nonexistent/file"], ["/nonexistent/file", "No such file"]),
    ],
)
def test_a_mistake_is_named_with_what_was_expected(arguments: list[str], parts: list[str]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        options_of(*arguments)
    for part in parts:
        assert part in caught.value.message


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("health", "expects <group>"),
        ("health:key", "expects <group>"),
        ("health:=value", "expects <group>"),
        ("health:key=", "expects <group>"),
        ("helth:key=value", "unknown restricted {kind} 'helth'.*did you mean 'health'"),
        (
            "health,metadata,health:key=value",
            "restricted {kind} 'health' can not be specified in multiple config groups",
        ),
    ],
)
@pytest.mark.parametrize(
    ("flag", "kind"), [("--http-restricted-api", "api"), ("--grpc-restricted-protocol", "protocol")]
)
def test_rules_that_protect_nothing_are_refused(flag: str, kind: str, rule: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{flag}.*{text.format(kind=kind)}"):
        options_of(f"{flag}={rule}")


def test_rules_and_patterns_are_those_of_their_protocol() -> None:
    options = options_of("--http-restricted-api=health,trace:K=a=b", "--grpc-restricted-protocol=logging:k=v")
    (rule,) = options.http_access.restrictions
    assert (rule.groups, rule.key, rule.secret) == ((ApiGroup.HEALTH, ApiGroup.TRACE), "k", "a=b")
    assert options.grpc_access.restrictions[0].key == "triton-grpc-protocol-k"
    with pytest.raises(InvalidArgumentError, match="not a regular expression"):
        options_of("--grpc-header-forward-pattern=(")


def test_backend_settings_are_by_backend_and_for_all() -> None:
    options = options_of("--backend-config=onnxruntime,threads=2", "--backend-config=default-max-batch-size=8")
    assert options.backend_options == {"onnxruntime": {"threads": "2"}, "": {"default-max-batch-size": "8"}}
    assert options_of("--allow-pickle-models").backend_options == {"": {"allow-pickle": "true"}}


@pytest.mark.parametrize(("word", "expected"), [("false", False), ("OFF", False), ("0", False), ("yes", True)])
def test_switches_of_the_metrics_take_all_forms_of_booleans(word: str, expected: bool) -> None:
    switches = options_of(f"--metrics-config=counter_latencies={word}").metrics_switches
    assert switches == {"counter_latencies": expected, "histogram_latencies": True, "summary_latencies": False}


def test_switches_of_the_metrics_without_effect_are_named() -> None:
    quantiles = "--metrics-config=summary_quantiles=0.5:0.05,0.99:0.001"
    assert ineffective_metrics_settings(options_of(quantiles)) == ["summary_quantiles"]
    options = options_of("--metrics-config=summary_latencies=true", quantiles)
    assert ineffective_metrics_settings(options) == []
    assert options.summary_quantiles == (0.5, 0.99)
    assert options_of("--metrics-config=summary_latencies=1").summary_quantiles == (0.5, 0.9, 0.95, 0.99, 0.999)
    assert options_of().summary_quantiles == ()


@pytest.mark.parametrize("text", ["", "0.5", "0.5:", "50:1", "0.5:0.1,", "a:b"])
def test_quantiles_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"summary_quantiles expects <quantile>:<error>"):
        options_of(f"--metrics-config=summary_quantiles={text}")


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("http-port: 1\ngrpc_port: 1\nmetrics-port: 1\nload-model: [a, b]\nmodel-control-mode: explicit\n")
    resolved = resolve_options(
        ["--http-port=3", f"--config={file}"],
        {"MODELSERVER_HTTP_PORT": "2", "MODELSERVER_GRPC_PORT": "2", "PATH": "/bin"},
    )
    options = resolved.options
    assert (options.http_port, options.grpc_port, options.metrics_port) == (3, 2, 1)
    assert options.load_model == ("a", "b")
    origins = {name: resolved.origins[name] for name in ("http_port", "grpc_port", "metrics_port", "id")}
    assert origins == {
        "http_port": "flag",
        "grpc_port": "environment MODELSERVER_GRPC_PORT",
        "metrics_port": f"file {file}",
        "id": "default",
    }


def test_the_environment_names_the_file_and_separates_repeated_values_by_semicolons(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("allow-grpc: no\n--exit-timeout-secs: 5\n")
    options = options_of(MODELSERVER_CONFIG=str(file), MODELSERVER_MODEL_REPOSITORY="/a;/b")
    assert (options.allow_grpc, options.exit_timeout_secs, options.model_repository) == (False, 5, ("/a", "/b"))


def test_vertex_ai_asks_for_its_endpoints_and_models_by_its_variables() -> None:
    options = options_of(AIP_MODE="PREDICTION", AIP_STORAGE_URI="gs://bucket/models")
    assert (options.allow_vertex_ai, options.allow_http, options.allow_grpc) == (True, False, False)
    assert options.model_repository == ("gs://bucket/models",)
    given = options_of("--allow-http=true", "/models", AIP_MODE="PREDICTION", AIP_STORAGE_URI="gs://bucket/models")
    assert (given.allow_vertex_ai, given.allow_http, given.allow_grpc) == (True, True, False)
    assert given.model_repository == ("/models",)
    assert options_of(AIP_MODE="TRAINING") == options_of()


def test_a_leader_worker_set_says_which_machine_of_which_group_it_is() -> None:
    group = {"LWS_LEADER_ADDRESS": "llm-0.llm.default", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
    options = options_of(**group)
    assert (options.nnodes, options.node_rank, options.leader) == (2, 1, ("llm-0.llm.default", 29500))
    options = options_of("--node-rank=0", "--dist-init-addr=[::1]:7000", **group)
    assert (options.nnodes, options.node_rank, options.leader) == (2, 0, ("::1", 7000))
    assert options_of(LWS_GROUP_SIZE="2") == options_of()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nnodes=2"], "--nnodes=2 needs --master-addr"),
        (["--node-rank=1"], "--node-rank=1: expected less than --nnodes=1"),
        (["--nnodes=2", "--master-addr=a:b"], "--master-addr=a:b: expected HOST"),
    ],
)
def test_flags_of_several_machines_belong_together(flags: list[str], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        options_of(*flags)


def test_service_links_of_kubernetes_are_not_options() -> None:
    assert options_of(MODELSERVER_HTTP_PORT="tcp://10.0.0.1:80", MODELSERVER_PORT="tcp://10.0.0.1:80").http_port == 8000


def test_unknown_variables_are_named_with_the_nearest_option() -> None:
    environment = {"MODELSERVER_HTTP_PROT": "1", "MODELSERVER_WHAT_IS_THIS": "2", "MODELSERVER_HTTP_PORT": "3"}
    assert unknown_variables({**environment, "HTTP_PROT": "x", "MODELSERVER_URL": "http://h"}) == (
        "environment variable MODELSERVER_HTTP_PROT is not a server option; did you mean 'MODELSERVER_HTTP_PORT'?",
        "environment variable MODELSERVER_WHAT_IS_THIS is not a server option",
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MODELSERVER_PORT", "tcp://10.0.0.1:8000"),
        ("MODELSERVER_SERVICE_HOST", "10.0.0.1"),
        ("MODELSERVER_SERVICE_PORT", "8000"),
        ("MODELSERVER_SERVICE_PORT_HTTP_V2", "8000"),
        ("MODELSERVER_PORT_8000_TCP", "tcp://10.0.0.1:8000"),
        ("MODELSERVER_PORT_8000_TCP_PROTO", "tcp"),
        ("MODELSERVER_PORT_8000_TCP_PORT", "8000"),
        ("MODELSERVER_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("MODELSERVER_CANARY_SERVICE_HOST", "10.0.0.1"),
        ("MODELSERVER_CANARY_PORT", "udp://10.0.0.1:8000"),
        ("MODELSERVER_CANARY_PORT_53_UDP_ADDR", "10.0.0.1"),
    ],
)
def test_service_links_of_kubernetes_are_not_mentioned(name: str, value: str) -> None:
    assert unknown_variables({name: value}) == ()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("http-prot: 1", "did you mean 'http-port'"),
        ("http-port: [1, 2]", "an integer from 0 to 65535"),
        ("http-port: many", "'many'"),
        ("http-port:", "got None"),
        ("- 1", "must be a mapping"),
        ("a: [", "not YAML"),
        ("config: other.yaml", "unknown option 'config'"),
    ],
)
def test_mistakes_in_the_file_name_it(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(text)
    with pytest.raises(InvalidArgumentError) as caught:
        options_of(f"--config={file}")
    assert part in caught.value.message
    assert str(file) in caught.value.message


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="environment variable MODELSERVER_HTTP_PORT expects an integer"):
        options_of(MODELSERVER_HTTP_PORT="x")


@pytest.mark.parametrize(
    ("arguments", "clause"),
    [
        (("--http-max-input-size=0",), "Error: --http-max-input-size must be greater than 0."),
        (("--grpc-max-response-pool-size=0",), "Error: --grpc-max-response-pool-size must be greater than 0."),
        (("--model-config-name=",), "Error: empty argument for --model-config-name"),
        (("--http-port=x",), 'Bad option: "--http-port".'),
        (("--load-model=m",), "Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as well"),
        (("--backend-config=x",), "--backend-config option format is '<backend name>,<setting>=<value>'"),
        (("--backend-config=x=",), "--backend-config option format is '<backend name>,<setting>=<value>'"),
        (("--backend-config=,x=1",), "--backend-config option format is '<backend name>,<setting>=<value>'"),
        (("--metrics-config=x",), "--metrics-config option format is '<setting>=<value>'"),
        (("--cache-config=local",), "--cache-config option format is '<cache name>,<setting>=<value>'"),
        (("--host-policy=x",), "--host-policy option format is '<policy name>,<setting>=<value>'"),
        (("--rate-limit-resource=x",), "--rate-limit-resource option format is '<resource_name>:<count>:<device>'"),
        (("--trace-config=x",), "--trace-config option format is '<trace mode>,<setting>=<value>'"),
        (("--trace-config=mode=x",), "invalid value for trace mode option: x"),
        (("--trace-config=rate=x",), 'Bad option: "--trace-config rate".'),
        (
            ("--trace-config=opentelemetry,bsp_schedule_delay=x",),
            'Bad option: "--trace-config opentelemetry,bsp_schedule_delay".',
        ),
    ],
)
def test_refusals_have_the_words_of_triton(arguments: tuple[str, ...], clause: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(clause)):
        options_of(*arguments)


_OTEL = ("--trace-config=mode=opentelemetry", "--trace-config=opentelemetry,resource=a=flag")


def test_variables_of_opentelemetry_count_where_no_flag_does() -> None:
    given = {
        "OTEL_BSP_MAX_QUEUE_SIZE": "7",
        "OTEL_BSP_SCHEDULE_DELAY": "8",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "9",
        "OTEL_RESOURCE_ATTRIBUTES": "a=variable, b=c%2Cd",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318/",
    }
    traces = options_of(*_OTEL, "--trace-config=opentelemetry,bsp_schedule_delay=1", **given).trace_options
    assert (traces.bsp_max_queue_size, traces.bsp_schedule_delay_ms, traces.bsp_max_export_batch_size) == (7, 1, 9)
    assert traces.resource == {"service.name": "modelserver", "a": "flag", "b": "c,d"}
    assert traces.url == "http://collector:4318/v1/traces"
    given["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] = "http://traces/in"
    assert options_of(*_OTEL, **given).trace_options.url == "http://traces/in"
    assert options_of(*_OTEL, "--trace-config=opentelemetry,url=http://f", **given).trace_options.url == "http://f"
    assert options_of("--trace-config=rate=1", **given).trace_options.bsp_max_queue_size == 2048
    given = {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"}
    traces = options_of(**given, OTEL_EXPORTER_OTLP_PROTOCOL="grpc", OTEL_SERVICE_NAME="shop").trace_options
    assert (traces.mode, traces.protocol, traces.url) == ("opentelemetry", "grpc", "localhost:4317")
    assert (traces.sampler, traces.start.levels) == ("traceidratio:0.5", frozenset({"TIMESTAMPS"}))
    assert traces.resource == {"service.name": "shop"}
    with pytest.raises(InvalidArgumentError, match="OpenTelemetry's sampler"):
        options_of(OTEL_TRACES_EXPORTER="otlp", OTEL_TRACES_SAMPLER="jaeger_remote")


@pytest.mark.parametrize("name", ["MAX_QUEUE_SIZE", "SCHEDULE_DELAY", "MAX_EXPORT_BATCH_SIZE"])
def test_a_bad_variable_of_opentelemetry_is_named_as_triton_does(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f'Bad option: "OTEL_BSP_{name}"'):
        options_of(*_OTEL, **{f"OTEL_BSP_{name}": "bad_value"})


def test_deprecated_options_are_known_with_what_to_use() -> None:
    options = options_of("--trace-file=f", "--trace-rate=2", "--strict-model-config", "--http-port=1")
    found = {option.flag_name: option.flag.help for option in deprecated(options)}
    assert found == {
        "--strict-model-config": "As --disable-auto-complete-config.",
        "--trace-file": "As --trace-config=triton,file=FILE.",
        "--trace-rate": "As --trace-config=rate=N.",
    }


def test_options_without_effect_are_known_by_name() -> None:
    options = options_of("--http-thread-count=3", "--strict-model-config", "--http-port=1", "--trace-rate=2")
    assert [option.flag_name for option in ineffective(options)] == ["--http-thread-count"]
    assert not options.auto_complete_config


def test_the_reference_lists_every_flag_with_its_state() -> None:
    text = markdown()
    for option in option_table():
        assert f"`{option.flag_name}`" in text


def test_the_reference_is_printed_by_the_module() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "modelserver.options.table"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert printed.stdout == markdown()


GRPC_TLS = {"grpc_server_cert": "c", "grpc_server_key": "k"}
ONE_PORT = {"http_port": 7000, "grpc_port": 7000}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tls_cert": "c"}, "--tls-cert needs --tls-key: say which file it is"),
        ({"tls_key": "k"}, "--tls-key needs --tls-cert"),
        ({"tls_client_ca": "a"}, "--tls-client-ca needs --tls-cert"),
        ({"tls_cert": "c", "tls_key": "k", "wire": "grpcio"}, "--tls-cert needs --wire=native"),
        ({"grpc_use_ssl": True}, "--grpc-use-ssl needs --grpc-server-cert"),
        ({"grpc_use_ssl": True, "grpc_server_cert": "c"}, "--grpc-use-ssl needs --grpc-server-key"),
        ({**GRPC_TLS, "grpc_use_ssl_mutual": True}, "--grpc-use-ssl-mutual needs --grpc-root-cert"),
        ({**GRPC_TLS, "grpc_use_ssl": True, "wire": "grpcio"}, "--grpc-use-ssl needs --wire=native"),
        ({"wire_processes": 3, "wire": "grpcio"}, "--wire-processes=3 needs --wire=native: the reference wire is"),
        ({**ONE_PORT, "wire": "grpcio"}, "both 7000: only --wire=native carries both protocols on one port"),
        ({**ONE_PORT, "shared_ports": False}, "both 7000: --shared-ports=false needs two ports"),
        ({**ONE_PORT, **GRPC_TLS, "grpc_use_ssl": True}, "both 7000: .* use --tls-cert and --tls-key"),
        ({"backend_directory": ("/no/such/place",)}, "--backend-directory: directory /no/such/place does not exist"),
    ],
)
def test_options_that_cannot_work_together_are_refused(fields: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        ServerOptions(model_repository=(".",), **fields)


def test_a_server_without_clients_is_refused_on_the_command_line() -> None:
    with pytest.raises(InvalidArgumentError, match="leaves nothing to serve"):
        resolve_options(["models", "--allow-http=false", "--allow-grpc=false"], {})


@pytest.mark.parametrize(
    ("fields", "is_one"),
    [
        (ONE_PORT, True),
        ({"http_port": 0, "grpc_port": 0}, False),
        ({**ONE_PORT, "allow_http": False}, False),
        ({**ONE_PORT, "grpc_address": "127.0.0.2"}, False),
        ({}, False),
    ],
)
def test_equal_ports_are_one(fields: dict[str, object], is_one: bool) -> None:
    assert ServerOptions(model_repository=(".",), **fields).is_one_port is is_one


def test_the_older_flags_of_tracing_do_what_they_did() -> None:
    older = ("--trace-file=t.json", "--trace-level=MAX", "--trace-rate=2", "--trace-count=3", "--trace-log-frequency=4")
    traced = options_of(*older).trace_options
    assert (traced.mode, traced.file) == ("triton", "t.json")
    assert traced.start == TraceSettings(frozenset({"TIMESTAMPS"}), 2, 3, 4)


def test_trace_config_wins_over_the_older_flags() -> None:
    older = ("--trace-file=t.json", "--trace-level=TENSORS", "--trace-rate=2")
    config = ("--trace-config=triton,file=u.json", "--trace-config=level=TIMESTAMPS")
    traced = options_of(*older, *config).trace_options
    assert (traced.file, traced.start.levels, traced.start.rate) == ("u.json", {"TIMESTAMPS"}, 2)


def test_an_older_flag_with_a_wrong_value_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="ALL"):
        options_of("--trace-level=ALL")
