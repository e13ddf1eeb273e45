"""Writes the parts of pages that follow from the code: `python docs/generate.py`.

Flags come from `modelserver.options.table`, fields from the proto and config_fields.toml, metrics from what the
server would answer to a scrape, limits from where they are enforced, routes from their frontends and routes.toml, and
extras from pyproject.toml and extras.toml. The text outside the markers is written by hand.
"""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from prometheus_client.core import Metric

from modelserver.app.frontends import http_apis
from modelserver.app.server import Server
from modelserver.auth.access import Access
from modelserver.auth.guard import KeyUse
from modelserver.cache.store import StoreCounts
from modelserver.config.pbtxt import MAX_CHARACTERS
from modelserver.config.schema import ModelConfig, ModelRateLimiter, ModelResponseCache, RateLimiterResource
from modelserver.frontends.grpc import head
from modelserver.frontends.http.clouds import MultiModel
from modelserver.frontends.http.metrics import Metrics
from modelserver.frontends.openai.batches.records import RowCounts, batch_families
from modelserver.frontends.openapi.routes import OpenApi, read_routes
from modelserver.options.server_options import ServerOptions
from modelserver.options.table import markdown
from modelserver.pb import model_config_pb2
from modelserver.protocol.api import Route, spelled_out
from modelserver.protocol.limits import DEFAULT_GRPC_LIMITS, HttpLimits
from modelserver.repository import namespaces
from modelserver.scheduling.rate_limit import RateLimiter
from modelserver.telemetry.counts import LoadCounts, RefusalCounts
from modelserver.telemetry.exposition import RenderedFamily
from modelserver.telemetry.file_reloads import FileReloads
from modelserver.telemetry.host import HostGauges
from modelserver.telemetry.load_page import LoadPage
from modelserver.telemetry.measurement import Measurement
from modelserver.telemetry.metrics import ServerMetrics
from modelserver.telemetry.statistics import ModelStatistics
from modelserver.telemetry.wire_counts import WireCounts, front_families, wire_families
from modelserver.wire.limits import WireLimits

DOCS = Path(__file__).resolve().parent
CONFIGURATION = DOCS / "configuration.md"
HTTP_ROUTES = DOCS / "reference" / "http.md"
START = DOCS / "index.md"
FAMILIES = DOCS / "families.md"
PAGES = (CONFIGURATION, HTTP_ROUTES, START, FAMILIES)
PYPROJECT = DOCS.parent / "pyproject.toml"

STATES = ("acts", "backend", "checked", "warned", "refused")
_ROOT = "ModelConfig"
_SECTION = re.compile(r"(<!-- begin: (\w+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)
# Made by prometheus_client about the process; which of them there are depends on the operating system.
_PROCESS = "process_"


@dataclass(frozen=True, slots=True)
class ConfigField:
    """One entry of config_fields.toml; `files` are relative to the repository."""

    state: str
    note: str
    files: tuple[str, ...]


def read_fields() -> dict[str, dict[str, ConfigField]]:
    """Message -> field -> what we do about it."""
    table = tomllib.loads((DOCS / "config_fields.toml").read_text())
    return {
        message: {name: ConfigField(state, note, tuple(files)) for name, (state, note, *files) in entries.items()}
        for message, entries in table.items()
    }


def messages() -> dict[str, Descriptor]:
    """Every message of a model config by its name without the package, in the order of first use."""
    found: dict[str, Descriptor] = {}
    waiting = [model_config_pb2.ModelConfig.DESCRIPTOR]
    while waiting:
        message = waiting.pop(0)
        if message.full_name.partition(".")[2] in found:
            continue
        found[message.full_name.partition(".")[2]] = message
        waiting += [inner for field in message.fields if (inner := _value(field).message_type) is not None]
    return found


def _value(field: FieldDescriptor) -> FieldDescriptor:
    """The field itself, or for a map the field of its values."""
    entry = field.message_type
    is_map = entry is not None and entry.GetOptions().map_entry
    return entry.fields_by_name["value"] if is_map else field


def config_fields() -> str:
    table = read_fields()
    lines: list[str] = []
    for name, message in messages().items():
        if not message.fields:
            continue
        lines += [
            "",
            f"### {name}",
            "",
            "| field | type | | meaning here, or why it has none | file |",
            "|---|---|---|---|---|",
        ]
        for field in message.fields:
            entry = table[name][field.name]
            files = " ".join(f"`{file}`" for file in entry.files)
            lines.append(f"| `{field.name}` | {_type(field)} | {entry.state} | {entry.note} | {files} |")
    return "\n".join(lines).lstrip("\n") + "\n"


_SCALARS = {
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_FLOAT: "float",
    FieldDescriptor.TYPE_DOUBLE: "double",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_UINT64: "uint64",
}


def _type(field: FieldDescriptor) -> str:
    value = _value(field)
    if value.message_type is not None:
        name = value.message_type.full_name.partition(".")[2]
        text = f"[{name}](#{name.lower().replace('.', '')})" if value.message_type.fields else name
    elif value.enum_type is not None:
        text = value.enum_type.name
    else:
        text = _SCALARS[value.type]
    if value is not field:
        return f"map {_SCALARS[field.message_type.fields_by_name['key'].type]} → {text}"
    return f"{text}, repeated" if field.is_repeated else text


class _Model:
    """A model as the metrics see it."""

    name = "m"
    version = 1
    load_duration_s = 0.0
    statistics = ModelStatistics()
    config = ModelConfig(response_cache=ModelResponseCache(enable=True))
    namespace = ""
    measures = False
    is_ensemble = False
    inflight = queue_depth = 0
    is_decoupled = True

    def __init__(self) -> None:
        self.statistics.process_restarts.expect()

    def measure(self) -> tuple[Sequence[Measurement], ...]:
        return ()


def _limiter() -> RateLimiter:
    limiter = RateLimiter()
    limiter.join("m_0", 0, ModelRateLimiter((RateLimiterResource("r", count=1),)))
    return limiter


def _reloads() -> FileReloads:
    reloads = FileReloads()
    reloads.took("--tls-cert", {"--tls-cert": 0.0})
    return reloads


def _first_sample(family: Metric) -> tuple[str, list[str]]:
    """The name and the labels of a family's first sample, which may be a line of text already."""
    if isinstance(family, RenderedFamily):
        line = family.blocks[0].text.decode().partition("\n")[0]
        return family.sample_name, re.findall(r'(\w+)="', line)
    return family.samples[0].name, list(family.samples[0].labels)


def metrics() -> str:
    server = ServerMetrics(
        lambda: [_Model()],
        lambda: {"m": LoadCounts()},
        server_version="",
        on_loop=[
            _limiter().families,
            RefusalCounts().families,
            partial(wire_families, WireCounts()),
            partial(front_families, ()),
            _reloads().families,
            lambda: batch_families((), RowCounts(), 0),
        ],
        off_loop=[HostGauges(interval_s=1.0).families],
        answers=StoreCounts(),
    )
    lines = ["| name | type | labels | meaning |", "|---|---|---|---|"]
    for family in server.collect():
        if family.name.startswith(_PROCESS):
            continue
        sample_name, labels = _first_sample(family)
        name = family.name if family.type == "histogram" else sample_name
        shown = ", ".join(label for label in labels if label != "le")
        lines.append(f"| `{name}` | {family.type} | {shown} | {family.documentation} |")
    lines.append(f"| `{_PROCESS}*` | | | CPU, memory, descriptors and start time of the server's process |")
    return "\n".join(lines) + "\n"


def limits() -> str:
    lines = ["| limit | default | flag | beyond it |", "|---|---|---|---|"]
    lines += [f"| {what} | {default} | {flag} | {error} |" for what, default, flag, error in _limits()]
    return "\n".join(lines) + "\n"


def _limits() -> Iterator[tuple[str, str, str, str]]:
    http = HttpLimits()
    size = "`--http-max-input-size`"
    yield "HTTP body as sent", f"{http.max_body_bytes} bytes", size, "413"
    yield "HTTP body after decompression", f"{http.max_body_bytes} bytes", size, "413"
    yield "memory of a tensor in JSON", f"{http.max_body_bytes} bytes", size, "413"
    yield "nesting of JSON, also in load requests", f"{http.max_json_depth} levels", "", "400"
    yield "inputs, and requested outputs, of an HTTP request", str(http.max_tensors), "", "413"
    assert http.max_name_len == head.MAX_NAME_LEN, "both protocols have the same limit"
    assert http.max_parameters == DEFAULT_GRPC_LIMITS.max_parameters, "both protocols have the same limit"
    yield "parameters of a request, and of each tensor", str(http.max_parameters), "", "400, INVALID_ARGUMENT"
    yield "name of an input", f"{http.max_name_len} characters", "", "400, INVALID_ARGUMENT"
    yield "dimensions of a shape", str(http.max_rank), "", "400, INVALID_ARGUMENT"
    yield "elements of a shape, 8 bytes each", "2^63 - 1 bytes", "", "400, INVALID_ARGUMENT"
    message_size = f"{ServerOptions().grpc_max_request_size} bytes"
    yield "gRPC message", message_size, "`--grpc-max-request-size`", "RESOURCE_EXHAUSTED"
    grpc = DEFAULT_GRPC_LIMITS
    yield "inputs, and requested outputs, of a gRPC request", str(grpc.max_tensors), "", "RESOURCE_EXHAUSTED"
    yield "unanswered requests of one `ModelStreamInfer` call", str(grpc.max_stream_inflight), "", "reading pauses"
    waiting = f"{ServerOptions().max_queue_size} at each priority level"
    flags = "`--max-queue-size`, or `max_queue_size` in config.pbtxt"
    yield "waiting requests of a model", waiting, flags, "503, UNAVAILABLE"
    yield "rows of a request", "`max_batch_size`", "in config.pbtxt", "400, INVALID_ARGUMENT"
    yield "config.pbtxt", f"{MAX_CHARACTERS} characters", "", "the model is not loaded"
    yield "name of a model", f"{namespaces._LONGEST_NAME_BYTES} bytes", "", "400, INVALID_ARGUMENT"


def wire_limits() -> str:
    lines = ["| limit | default | flag | beyond it |", "|---|---|---|---|"]
    lines += [f"| {what} | {default} | {flag} | {over} |" for what, default, flag, over in _wire_limits()]
    return "\n".join(lines) + "\n"


def _wire_limits() -> Iterator[tuple[str, str, str, str]]:
    limits = WireLimits()
    times, http_head, http2, keepalive = limits.times, limits.head, limits.http2, limits.keepalive
    yield (
        "connections of a port",
        str(limits.max_connections),
        "`--max-connections`",
        "503; HTTP/2 is closed, so that clients back off",
    )
    yield "file descriptors", "90 % of `ulimit -n`", "", "as above"
    yield "time to the end of the first head, or of the TLS handshake", f"{times.head_s:g} s", "", "408, or closed"
    yield "request target", f"{http_head.max_target_bytes} bytes", "", "414"
    yield "request line and headers, HTTP/1.1", f"{http_head.max_http1_bytes} bytes", "", "431"
    yield "headers, HTTP/1.1", str(http_head.max_http1_fields), "", "431"
    list_size = f"{http_head.max_http2_list_bytes} bytes by RFC 9113's count"
    yield "headers, HTTP/2", list_size, "", "431, RESOURCE_EXHAUSTED"
    block = f"{http_head.max_header_block_bytes} bytes, {http_head.max_continuations} CONTINUATION frames"
    yield "a header block", block, "", "GOAWAY"
    yield "pipelined requests, HTTP/1.1", str(limits.max_pipelined), "", "the server stops reading the connection"
    streams = "`--max-concurrent-streams`"
    yield "requests in flight, HTTP/2 connection", str(http2.max_concurrent_streams), streams, "REFUSED_STREAM"
    yield "a pause within a body", f"{times.body_pause_s:g} s", "", "408, DEADLINE_EXCEEDED"
    rate = f"{times.body_rate} bytes/s over {times.body_window_s:g} s"
    yield "pace of a body", rate, "", "408, DEADLINE_EXCEEDED"
    yield "received bytes of unfinished requests", f"{limits.max_assembly_bytes}", "", "503, RESOURCE_EXHAUSTED"
    yield "a client that reads nothing", f"{times.slow_reader_s:g} s", "", "CANCEL, or closed"
    yield "idle HTTP/1.1 connection", f"{times.http1_idle_s:g} s", "`--http-idle-timeout`", "closed"
    yield "idle HTTP/2 connection", f"{times.http2_idle_s:g} s", "", "GOAWAY"
    buckets = (
        ("resets of unfinished requests, HTTP/2 connection", http2.resets_burst, http2.resets_per_s),
        ("frames that do nothing, HTTP/2 connection", http2.glitches_burst, http2.glitches_per_s),
    )
    for what, burst, rate_per_s in buckets:
        yield what, f"{burst}, then {rate_per_s} a second", "", "GOAWAY ENHANCE_YOUR_CALM"
    yield "waiting answers to SETTINGS and PING", str(http2.max_control_frames), "", "GOAWAY ENHANCE_YOUR_CALM"
    strikes = f"{keepalive.max_ping_strikes} that follow within {keepalive.min_ping_interval_s:g} s"
    yield "pings of a client", strikes, "`--grpc-http2-max-ping-strikes`, ...", "GOAWAY too_many_pings"


def served_routes() -> dict[str, Route]:
    """Every route of the HTTP port and of SageMaker's models, by "METHOD pattern"."""
    return asyncio.run(_served_routes())


async def _served_routes() -> dict[str, Route]:
    server = Server(ServerOptions())
    apis = http_apis(server.dataplane, server.controlplane, HttpLimits())
    metrics = Metrics(lambda: iter(()), LoadPage(tuple)).api()
    docs = OpenApi(server.dataplane, Access(), has_keys=False).api()
    models = MultiModel(server.controlplane, HttpLimits(), lambda *_: None).routes()
    routes = [route for api in (*apis, metrics, docs) for route in api.routes]
    return {f"{route.method} {_with_file(route.pattern)}": route for route in (*routes, *models)}


def _with_file(pattern: str) -> str:
    """The console has a route for each of its files, which one line stands for."""
    return re.sub(r"^/console/.+", "/console/{file}", pattern)


def routes() -> str:
    served = served_routes()
    lines: list[str] = []
    for section, entries in read_routes().items():
        lines += ["", f"## {section}", "", "| method | path | group | key | meaning |", "|---|---|---|---|---|"]
        for key, meaning in entries.items():
            method, _, pattern = key.partition(" ")
            route = served[spelled_out(key)[0]]
            scope = "none" if route.key is KeyUse.UNUSED else f"`{route.needs.scope.value}`"
            lines.append(f"| {method} | `{pattern}` | `{route.group.value}` | {scope} | {meaning} |")
    return "\n".join(lines).lstrip("\n") + "\n"


def read_unserved() -> dict[str, dict[str, str]]:
    """API -> "METHOD pattern" of the server whose API it is -> why the route is not served."""
    return tomllib.loads((DOCS / "families.toml").read_text())


def family_routes() -> dict[str, dict[str, str]]:
    """API of language models -> "METHOD pattern" -> on which port it is served."""
    return asyncio.run(_family_routes())


async def _family_routes() -> dict[str, dict[str, str]]:
    server = Server(ServerOptions())
    apis = {api.name: api for api in http_apis(server.dataplane, server.controlplane, HttpLimits())}
    return {
        name: {
            **{f"{route.method} {route.pattern}": "served" for route in apis[name].routes},
            **{f"{route.method} {route.pattern}": "own port" for route in apis[name].own_routes},
        }
        for name in read_unserved()
    }


def families() -> str:
    lines: list[str] = []
    for name, served in family_routes().items():
        unserved = read_unserved()[name]
        lines += ["", f"## {name}", "", "| route | | |", "|---|---|---|"]
        lines += [f"| `{route}` | {where} | |" for route, where in served.items() if route not in unserved]
        lines += [f"| `{route}` | not served | {why} |" for route, why in unserved.items()]
    return "\n".join(lines).lstrip("\n") + "\n"


def read_openai_fields() -> dict[str, dict[str, tuple[str, str]]]:
    """Route -> field of OpenAI's request -> "served", "no effect" or "refused", and why."""
    table = tomllib.loads((DOCS / "openai_fields.toml").read_text())
    return {route: {name: (state, why) for name, (state, why) in fields.items()} for route, fields in table.items()}


def openai_fields() -> str:
    lines: list[str] = []
    for route, fields in read_openai_fields().items():
        lines += ["", f"### `{route}`", "", "| field | | |", "|---|---|---|"]
        lines += [f"| `{name}` | {state} | {why} |" for name, (state, why) in fields.items()]
    return "\n".join(lines).lstrip("\n") + "\n"


def read_extras() -> dict[str, str]:
    """Extra -> what a user needs it for."""
    return dict(tomllib.loads((DOCS / "extras.toml").read_text()))


def distributions() -> dict[str, list[str]]:
    """Extra -> the names of the distributions that it installs."""
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    return {extra: [re.split(r"[\[<>=~!; ]", need)[0] for need in needs] for extra, needs in extras.items()}


def extras() -> str:
    needs = distributions()
    lines = ["| extra | for | installs |", "|---|---|---|"]
    lines += [f"| `{extra}` | {purpose} | {', '.join(needs[extra])} |" for extra, purpose in read_extras().items()]
    return "\n".join(lines) + "\n"


SECTIONS: Mapping[str, Callable[[], str]] = {
    "flags": markdown,
    "fields": config_fields,
    "metrics": metrics,
    "limits": limits,
    "wire_limits": wire_limits,
    "routes": routes,
    "families": families,
    "openai_fields": openai_fields,
    "extras": extras,
}


def rewritten(text: str) -> str:
    """`text` with every generated section as the code has it now."""
    return _SECTION.sub(lambda match: f"{match[1]}{SECTIONS[match[2]]()}{match[3]}", text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rewritten(page.read_text()))
