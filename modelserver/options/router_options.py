"""The options of `modelserver route`: its own, and those of the server's that a router has too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from modelserver.errors import InvalidArgumentError
from modelserver.options.flags import Option, OptionValue, flag
from modelserver.options.server_options import ServerOptions
from modelserver.options.sources import Values, parse_arguments, parse_environment, read_file
from modelserver.options.table import describe_options, option_table

REPLICAS = "Replicas"
AFFINITIES = ("prefix", "session", "none")

# The server's groups and single options that make no sense without models, or that replicas enforce.
_GROUPS = frozenset({"Server", "Ports and TLS", "Logging", "HTTP", "gRPC", "Metrics"})
_SERVER_ONLY = frozenset(
    {
        *("id", "overload_statuses", "adaptive_admission", "callers_by", "caller_limits", "wire"),
        *("wire_processes", "listen_when_ready", "ollama", "ollama_port", "api_keys_file"),
        *("model_output_lines_per_sec", "http_max_input_size", "http_header_forward_pattern", "http_thread_count"),
        *("http_restricted_api", "allowed_media_domains", "api", "grpc_max_request_size"),
        *("grpc_infer_response_compression_level", "grpc_header_forward_pattern", "grpc_infer_thread_count"),
        *("grpc_infer_allocation_pool_size", "grpc_max_response_pool_size", "grpc_restricted_protocol"),
        *("allow_cpu_metrics", "allow_gpu_metrics", "metrics_interval_ms", "metrics_config"),
        *("batch_directory", "batch_concurrency", "batch_max_bytes"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingOptions:
    """The router's own options."""

    # fmt: off
    to: tuple[str, ...] = field(default=(), metadata=flag(REPLICAS, "Address of a replica, or several with commas: http://HOST:PORT, https://HOST:PORT, HOST:PORT. The port must answer HTTP and gRPC, as the HTTP port of `modelserver serve` does. Repeat for more.", metavar="ADDRESS[,ADDRESS...]", is_ours=True))
    discover: str = field(default="", metadata=flag(REPLICAS, "Where to find the replicas instead: dns://NAME:PORT (all addresses of the name, looked up every 5 s), file:PATH (JSON, read again when it changes), http://HOST:PORT/PATH (a stream of such documents, one a line). See docs/scale.md.", metavar="SOURCE", is_ours=True))
    affinity: str = field(default="prefix", metadata=flag(REPLICAS, "Which requests go to the same replica: prefix (those whose prompts begin alike, and those of one sequence or session), session (only the latter), none.", choices=AFFINITIES, is_ours=True))
    balance: str = field(default="least_outstanding", metadata=flag(REPLICAS, "How the other requests are spread: least_outstanding (the less loaded of two that chance picks) or round_robin.", choices=("least_outstanding", "round_robin"), is_ours=True))
    wait_for_replica_secs: float = field(default=0.0, metadata=flag(REPLICAS, "Seconds that a request waits while no replica is ready, for replicas that are started on demand. 0: it fails at once with 503 (UNAVAILABLE).", minimum=0, maximum=3600, is_ours=True))
    max_waiting: int = field(default=1000, metadata=flag(REPLICAS, "Requests that wait so at a time; further ones fail at once.", minimum=1, is_ours=True))
    replica_ca: str = field(default="", metadata=flag(REPLICAS, "Certificates of authorities for https replicas; empty: those of the system.", metavar="FILE", is_ours=True))
    replica_cert: str = field(default="", metadata=flag(REPLICAS, "Certificate that the router presents to https replicas (mutual TLS).", metavar="FILE", is_ours=True))
    replica_key: str = field(default="", metadata=flag(REPLICAS, "Private key of --replica-cert.", metavar="FILE", is_ours=True))
    # fmt: on

    def __post_init__(self) -> None:
        if bool(self.addresses) == bool(self.discover):
            raise InvalidArgumentError(
                "a router needs its replicas: --to=http://HOST:PORT[,...], or --discover=SOURCE"
                + (", not both" if self.discover else "")
            )
        for name in (self.replica_ca, self.replica_cert, self.replica_key):
            if name and not Path(name).is_file():
                raise InvalidArgumentError(f"there is no file '{name}'")
        if bool(self.replica_cert) != bool(self.replica_key):
            raise InvalidArgumentError("--replica-cert and --replica-key need each other")

    @property
    def addresses(self) -> tuple[str, ...]:
        """The replicas that --to names."""
        words = [each.strip() for text in self.to for each in text.split(",")]
        return tuple(each if "://" in each else f"http://{each}" for each in words if each)


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """`server` has the options of ports, TLS and logs."""

    routing: RoutingOptions
    server: ServerOptions


@cache
def router_table() -> tuple[Option, ...]:
    """All options of a router: its own, then the server's."""
    return (
        *describe_options(RoutingOptions),
        *(each for each in option_table() if each.flag.group in _GROUPS and each.name not in _SERVER_ONLY),
    )


def resolve_router_options(arguments: Sequence[str], environment: Mapping[str, str]) -> RouterOptions:
    """The options of a command line, of the environment, and of the file that --config names, in this order.

    Bare words are replicas. Raises InvalidArgumentError.
    """
    table = router_table()
    given = parse_arguments(arguments, table, bare="to")
    from_environment = parse_environment(environment, table)
    path = given.get("config") or from_environment.get("config")
    values: Values = {**(read_file(Path(str(path)), table) if path else {}), **from_environment, **given}
    own = {each.name for each in fields(RoutingOptions)}
    routing: dict[str, Any] = {name: value for name, value in values.items() if name in own}
    server: dict[str, OptionValue] = {name: value for name, value in values.items() if name not in own}
    options = RouterOptions(RoutingOptions(**routing), ServerOptions(**server))  # type: ignore[arg-type] # parsed as its option's type
    if not (options.server.allow_http or options.server.allow_grpc):
        raise InvalidArgumentError("--allow-http=false with --allow-grpc=false leaves nothing to serve; allow one")
    return options
