"""Every process-wide option, in one table: name, type, default, meaning, and how the server treats it.

A field `http_port` is the flag `--http-port`, the variable `MODELSERVER_HTTP_PORT` and the key `http-port` of the
file given by `--config`. Names and defaults are Triton's unless the help says otherwise. The reference in
docs/configuration.md is printed from this table by `python -m modelserver.options.server_options`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from modelserver.auth.access import Access, Cors, parse_access, parse_callers_by, parse_cors, parse_objectives
from modelserver.auth.caller_limits import CallerLimits, parse_limits_flag
from modelserver.cache.settings import CacheSettings, parse_cache_config
from modelserver.config.config_limits import ConfigLimits, parse_config_limits
from modelserver.config.resources import (
    HostPolicy,
    ResourceLimit,
    parse_gpu_limits,
    parse_host_policies,
    parse_resource_limits,
)
from modelserver.core.numerals import is_digits
from modelserver.core.spelling import BOOL_EXPECTATION, bad_format, nearest_hint, parse_bool
from modelserver.errors import InvalidArgumentError
from modelserver.options.flags import ApiChoice, FlagState, flag, parse_api_choices
from modelserver.telemetry.summary import DEFAULT_QUANTILES, parse_quantiles
from modelserver.telemetry.trace_settings import OPENTELEMETRY, TraceOptions, parse_trace_config

SERVER = "Server"
PORTS = "Ports and TLS"
LOGGING = "Logging"
REPOSITORY = "Model repository"
BACKENDS = "Backends"
HTTP = "HTTP"
GRPC = "gRPC"
METRICS = "Metrics"
TRACING = "Tracing"
CACHE = "Response cache and rate limiter"
MEMORY = "Memory and devices"
CLOUDS = "SageMaker and Vertex AI"
DEPRECATED = "Deprecated"

_NOT_YET = FlagState.ACCEPTED
_OLD = FlagState.DEPRECATED
_PORT: dict[str, int] = {"minimum": 0, "maximum": 65535}
_INT_MAX = 2**31 - 1
_TRACE_RATE, _TRACE_COUNT = 1000, -1
_MODES = ("none", "poll", "explicit")
_LEVELS = ("none", "low", "medium", "high")
# Families of --metrics-config and whether they are on by default; Triton leaves histograms out.
_METRICS_SWITCHES = {"counter_latencies": True, "histogram_latencies": True, "summary_latencies": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The server's options. Raises InvalidArgumentError for a combination that cannot work."""

    # fmt: off
    id: str = field(default="triton", metadata=flag(SERVER, "Name in the server's metadata, which some clients compare with Triton's."))
    exit_timeout_secs: int = field(default=30, metadata=flag(SERVER, "Seconds that requests in flight and in queues have to finish after SIGTERM or SIGINT, and after --drain-delay-secs. Requests that are not finished then fail with 503 or UNAVAILABLE.", minimum=0))
    drain_delay_secs: float = field(default=0.0, metadata=flag(SERVER, "Seconds after SIGTERM or SIGINT during which the server reports that it is not ready but still serves, so that load balancers notice before it closes its ports.", minimum=0, maximum=3600, is_ours=True))
    config: str = field(default="", metadata=flag(SERVER, "YAML file of options: a mapping from flag names to values.", metavar="FILE", is_ours=True))
    tune_malloc: bool = field(default=True, metadata=flag(SERVER, "Let the C allocator keep large buffers, so that large tensors do not cause page faults in every request.", is_ours=True))
    overload_statuses: bool = field(default=False, metadata=flag(SERVER, "Answer 429 with Retry-After (gRPC: RESOURCE_EXHAUSTED) when a queue is full, and 504 (DEADLINE_EXCEEDED) when a request times out in a queue. false: 503 (UNAVAILABLE) for both, as Triton does.", is_ours=True))
    adaptive_admission: bool = field(default=True, metadata=flag(SERVER, "Refuse a request at once if it would wait longer than its timeout or deadline allows, judged by the rate at which the queue empties (docs/overload.md).", is_ours=True))
    callers_by: str = field(default="key", metadata=flag(SERVER, "How callers are identified, for queues that callers share by weight and for quotas: key (the API key, if keys are in use), address, header:NAME (as set by a proxy), none.", metavar="SOURCE", is_ours=True))
    caller_limits: str = field(default="", metadata=flag(SERVER, "Limits for each caller whose API key does not set its own: requests_per_second, tokens_per_second, concurrent, weight.", metavar="NAME=NUMBER[,NAME=NUMBER...]", is_ours=True))
    inference_objectives: str = field(default="", metadata=flag(SERVER, "Priority levels by the objective that an endpoint picker names in the header or metadata x-llm-d-inference-objective; 1 is served first. A request's own priority wins.", metavar="NAME=LEVEL[,NAME=LEVEL...]", is_ours=True))
    wire: str = field(default="native", metadata=flag(SERVER, "Implementation of HTTP and gRPC: native is our own; grpcio uses uvicorn and grpcio and is kept as the reference.", choices=("native", "grpcio"), is_ours=True))

    wire_processes: int = field(default=1, metadata=flag(PORTS, "Processes that handle sockets, TLS, HTTP, decoding and encoding in front of the process that batches and executes. 1: one process does everything, which is best except for heavy TLS or JSON traffic on many cores.", minimum=1, maximum=64, is_ours=True))
    host: str = field(default="127.0.0.1", metadata=flag(PORTS, "Address of every port whose own flag does not set one. The default is reachable from this machine only; 0.0.0.0 (all addresses, Triton's default) opens the ports to the network.", metavar="ADDRESS", is_ours=True))
    listen_when_ready: bool = field(default=False, metadata=flag(PORTS, "Open the HTTP and gRPC ports only when the models are loaded, for proxies that send requests to any open port. false: open them at once; the health endpoints report when the models are ready.", is_ours=True))
    shared_ports: bool = field(default=True, metadata=flag(PORTS, "Answer HTTP and gRPC on the HTTP port as well as on the gRPC port; the two may then be the same port. false: each port answers its own protocol only.", is_ours=True))
    max_connections: int = field(default=10_000, metadata=flag(PORTS, "Connections that a port accepts at a time; further connections are refused.", minimum=1, is_ours=True))
    busy_poll_percent: int = field(default=10, metadata=flag(PORTS, "Share of a core that the event loop may spend, before it sleeps, polling for the next request of a client that it has just answered: a lone client is then answered in half the time. 0: the loop sleeps at once; 100: it polls as long as requests follow each other within 50 us.", minimum=0, maximum=100, is_ours=True))
    recognize_requests: bool = field(default=True, metadata=flag(PORTS, "Recognize requests that repeat earlier ones by their bytes, and parse only what is new in them. Answers are the same either way. false: parse every request in full, to find out whether a problem comes from this.", is_ours=True))
    max_concurrent_streams: int = field(default=1000, metadata=flag(PORTS, "Requests that an HTTP/2 connection may have in flight; further requests wait at the client.", minimum=1, maximum=_INT_MAX, is_ours=True))
    http_idle_timeout: int = field(default=75, metadata=flag(PORTS, "Seconds after which an HTTP/1.1 connection without a request is closed.", minimum=1, is_ours=True))
    ollama: bool = field(default=False, metadata=flag(PORTS, "Also serve Ollama's API and OpenAI's on --ollama-port, where Ollama's clients look for a server (docs/ollama.md).", is_ours=True))
    ollama_port: int = field(default=11434, metadata=flag(PORTS, "Port for --ollama.", **_PORT, is_ours=True))
    min_body_rate: int = field(default=1024, metadata=flag(PORTS, "Bytes a second that the body of a request, or a message of a gRPC call, must average over a minute while it is received; slower requests are aborted. 0: any rate is accepted, but not pauses of 30 s.", minimum=0, maximum=_INT_MAX, is_ours=True))
    tls_cert: str = field(default="", metadata=flag(PORTS, "Certificate of the server in PEM form, followed by any intermediate certificates. Enables TLS on every port, including the metrics port. Read again when it changes.", metavar="FILE", is_ours=True, aliases=("ssl_certfile",)))
    tls_key: str = field(default="", metadata=flag(PORTS, "Private key of --tls-cert.", metavar="FILE", is_ours=True, aliases=("ssl_keyfile",)))
    tls_client_ca: str = field(default="", metadata=flag(PORTS, "Certificates of authorities. Every client must present a certificate signed by one of them.", metavar="FILE", is_ours=True, aliases=("ssl_ca_certs",)))

    api_keys_file: str = field(default="", metadata=flag(PORTS, "Hashed API keys, as written by `modelserver keys create`. Every call except health checks then needs a key, over HTTP and gRPC and on the metrics port (docs/security.md). Read again when it changes.", metavar="FILE", is_ours=True))

    log_verbose: int = field(default=0, metadata=flag(LOGGING, "1 or more also logs debugging details and one line per inference request; true means 1.", minimum=0, takes_switch=True))
    log_info: bool = field(default=True, metadata=flag(LOGGING, "Log lifecycle events of the server and its models."))
    log_warning: bool = field(default=True, metadata=flag(LOGGING, "Log warnings."))
    log_error: bool = field(default=True, metadata=flag(LOGGING, "Log errors."))
    log_format: str = field(default="default", metadata=flag(LOGGING, "Format of log lines; json is ours: one object per line.", choices=("default", "ISO8601", "json")))
    access_log: bool = field(default=False, metadata=flag(LOGGING, "Log one line for each call, whether it succeeds or fails: protocol, path, status, duration, sizes, peer, model, ids, and the name of its API key.", is_ours=True))
    model_output_lines_per_sec: int = field(default=200, metadata=flag(LOGGING, "Lines per second that each child process of a model may write to the log, with bursts of ten times as many after a pause. Lines longer than 200 bytes count several times. Excess lines are dropped, and the log says how many. 0: no limit (Triton's behaviour).", minimum=0, is_ours=True))
    log_file: str = field(default="", metadata=flag(LOGGING, "Append the log to this file instead of writing it to standard error.", metavar="FILE"))

    model_repository: tuple[str, ...] = field(default=(), metadata=flag(REPOSITORY, "Directory of models, directory or file of a single model, or the address of a directory in an object store: s3://, gs://, as://, abfs://. Repeat for several.", aliases=("model_store",), metavar="DIRECTORY"))
    store: str = field(default="", metadata=flag(REPOSITORY, "Model store, which `modelserver pull` fills: each of its models is one of the repository, loaded on demand (docs/store.md).", metavar="DIRECTORY", is_ours=True))
    model_name: str = field(default="", metadata=flag(REPOSITORY, "Name for the model when --model-repository is one model's directory.", metavar="NAME", is_ours=True, aliases=("served_model_name",)))
    model_control_mode: str = field(default="none", metadata=flag(REPOSITORY, "none: load all at start. poll: also follow changes on disk. explicit: only --load-model and the load and unload requests.", choices=_MODES))
    repository_poll_secs: int = field(default=15, metadata=flag(REPOSITORY, "Seconds between scans of the repository in mode poll.", minimum=1))
    load_model: tuple[str, ...] = field(default=(), metadata=flag(REPOSITORY, "Model to load at start in mode explicit; * alone means all models. Repeat for several.", metavar="NAME"))
    exit_on_error: bool = field(default=False, metadata=flag(REPOSITORY, "Exit when a model fails to load at start (Triton: true). false: serve the others; readiness tells."))
    strict_readiness: bool = field(default=True, metadata=flag(REPOSITORY, "Report readiness only when every model that should be loaded is ready."))
    disable_auto_complete_config: bool = field(default=False, metadata=flag(REPOSITORY, "Use config.pbtxt as it is; do not complete it from the model's files."))
    model_config_name: str = field(default="", metadata=flag(REPOSITORY, "Use <model>/configs/<name>.pbtxt where it exists.", metavar="NAME", minimum=1, refusal="Error: empty argument for --model-config-name."))
    model_load_thread_count: int = field(default=4, metadata=flag(REPOSITORY, "Models loaded at the same time.", minimum=1))
    model_load_retry_count: int = field(default=0, metadata=flag(REPOSITORY, "Retries after a failed load.", minimum=0))
    max_queue_size: int = field(default=100_000, metadata=flag(REPOSITORY, "Requests that may wait in the queue of a model whose config sets no max_queue_size, per priority level; 0: no limit (Triton's behaviour).", minimum=0, is_ours=True))
    cloud_cache_directory: str = field(default="", metadata=flag(REPOSITORY, "Directory for local copies of models from object stores; empty: the directory named by Triton's TRITON_AWS_MOUNT_DIRECTORY and the matching variables of other stores, or the user's cache directory.", metavar="DIRECTORY", is_ours=True))
    cloud_cache_byte_size: int = field(default=0, metadata=flag(REPOSITORY, "Total size of copies in bytes above which unused copies are removed, least recently used first; 0: no limit. Use it only when a single server uses the directory.", minimum=0, is_ours=True))
    override_directory: str = field(default="", metadata=flag(REPOSITORY, "Directory for overrides that a load request asks to persist; they apply again after a restart.", metavar="DIRECTORY", is_ours=True))
    model_namespacing: bool = field(default=False, metadata=flag(REPOSITORY, "Let repositories have models of the same name, each in a namespace of its own."))
    load_on_demand: bool = field(default=False, metadata=flag(REPOSITORY, "Load a model at the first request for it instead of at start (docs/repository.md). A model's parameter load_on_demand overrides this.", is_ours=True))
    config_limits: str = field(default="", metadata=flag(REPOSITORY, "Limits on what the config of one model may request, where they differ from the defaults (docs/instances.md#limits): instances, versions, warmup_requests, warmup_bytes, sequence_slots, state_bytes, priority_levels, preferred_sizes, ensemble_steps, histogram_buckets. A config that exceeds a limit is refused at load.", metavar="NAME=NUMBER[,NAME=NUMBER...]", is_ours=True))
    unload_grace_secs: float = field(default=300.0, metadata=flag(REPOSITORY, "Seconds that an unloaded or replaced model has to answer its remaining requests. Then its child processes are killed and those requests fail. An execution inside the server process cannot be stopped; the log and the repository index report it. 0: no limit (Triton's behaviour).", minimum=0, is_ours=True))
    model_keep_alive_secs: int = field(default=300, metadata=flag(REPOSITORY, "Seconds without requests after which a model that was loaded on demand is unloaded, unless its parameter keep_alive sets another time; -1: never.", minimum=-1, is_ours=True))
    on_demand_memory_budget: int = field(default=0, metadata=flag(REPOSITORY, "Bytes that models loaded on demand may use together; the least recently used models are unloaded to make room. 0: no limit.", minimum=0, is_ours=True))

    batch_directory: str = field(default="", metadata=flag(HTTP, "Directory for the files and batches of OpenAI's API (docs/batches.md), which survive a restart; one server uses it at a time. Without one, /v1/files and /v1/batches are refused.", metavar="DIRECTORY", is_ours=True))
    batch_concurrency: int = field(default=64, metadata=flag(HTTP, "Requests of batches that run at a time; an eighth of them while clients use the same model.", minimum=1, maximum=100_000, is_ours=True))
    batch_max_bytes: int = field(default=1 << 30, metadata=flag(HTTP, "Bytes of files that each API key may keep in --batch-directory.", minimum=1, is_ours=True))

    backend_directory: tuple[str, ...] = field(default=(), metadata=flag(BACKENDS, "Directory of backend packages, searched before the bundled ones. Repeat for several.", metavar="DIRECTORY"))
    backend_config: tuple[str, ...] = field(default=(), metadata=flag(BACKENDS, "Setting of one backend, or of all backends if BACKEND is left out. Repeat for several.", metavar="[BACKEND],KEY=VALUE"))
    nnodes: int = field(default=1, metadata=flag(BACKENDS, "Machines that share the tensor_parallel_size of language models (docs/scale.md): each runs modelserver serve, with the same paths of models. In a LeaderWorkerSet: its LWS_GROUP_SIZE.", minimum=1, maximum=1024, is_ours=True))
    node_rank: int = field(default=0, metadata=flag(BACKENDS, "Which of --nnodes this machine is. 0 is the leader, which serves; the others compute for it and open no port. In a LeaderWorkerSet: its LWS_WORKER_INDEX.", minimum=0, maximum=1023, is_ours=True))
    master_addr: str = field(default="", metadata=flag(BACKENDS, "Address of the leader of --nnodes, at which the others reach it and it listens while models load; with a port or without. In a LeaderWorkerSet: its LWS_LEADER_ADDRESS.", metavar="HOST[:PORT]", is_ours=True, aliases=("dist_init_addr",)))
    master_port: int = field(default=29500, metadata=flag(BACKENDS, "Port of --master-addr that names none.", minimum=1, maximum=65535, is_ours=True))
    execute_timeout_secs: float = field(default=3600.0, metadata=flag(BACKENDS, "Seconds that a model in a child process (Python models, instance_in_process) may take for one batch before the process is killed, the batch fails and the process is started again; the parameter EXECUTE_TIMEOUT_SECONDS of a model overrides it. 0: no limit (Triton's behaviour).", minimum=0, is_ours=True))
    allow_pickle_models: bool = field(default=False, metadata=flag(BACKENDS, "Let backends load pickled models. Anyone who can write such a model can run code in the server.", is_ours=True))
    allow_model_backends: bool = field(default=False, metadata=flag(BACKENDS, "Let a model's directory contain its own backend. Anyone who can write to that directory can run code in the server.", is_ours=True))
    repoagent_directory: str = field(default="", metadata=flag(BACKENDS, "Directory of repository agents (Python modules or packages). The checksum agent is always available.", metavar="DIRECTORY"))

    allow_http: bool = field(default=True, metadata=flag(HTTP, "Serve HTTP."))
    http_address: str = field(default="", metadata=flag(HTTP, "Address to listen on; empty: that of --host (Triton: 0.0.0.0).", metavar="ADDRESS"))
    http_port: int = field(default=8000, metadata=flag(HTTP, "Port to listen on; 0 picks a free one.", **_PORT, aliases=("port",)))
    http_max_input_size: int = field(default=64 << 20, metadata=flag(HTTP, "Largest request body in bytes, as received and when decompressed.", minimum=1, refusal="Error: --http-max-input-size must be greater than 0."))
    reuse_http_port: bool = field(default=False, metadata=flag(HTTP, "Share the port, and that of the metrics, with other processes (SO_REUSEPORT)."))
    http_header_forward_pattern: str = field(default="", metadata=flag(HTTP, "Headers to pass to models as request parameters, under their original names. The pattern may match anywhere in a name and ignores case.", metavar="REGEX"))
    http_thread_count: int = field(default=8, metadata=flag(HTTP, "One event loop serves all connections, whatever the value.", state=_NOT_YET, minimum=1))
    http_restricted_api: tuple[str, ...] = field(default=(), metadata=flag(HTTP, "Groups of endpoints that require the header KEY with this value: health, metadata, inference, shared-memory, model-config, model-repository, statistics, trace, logging. Repeat for several.", metavar="API[,API...]:KEY=VALUE"))
    allowed_media_domains: tuple[str, ...] = field(default=(), metadata=flag(HTTP, "Host from which pictures of conversations may be fetched, or host:port. Repeat for several. Without it only data: URLs are read.", metavar="HOST", is_ours=True))
    http_cors_origin: tuple[str, ...] = field(default=(), metadata=flag(HTTP, "Origin whose web pages may call the server from a browser (CORS), or * for every page. Repeat for several.", metavar="ORIGIN", is_ours=True))
    http_cors_credentials: bool = field(default=False, metadata=flag(HTTP, "Let these pages send cookies and the browser's client certificates; API keys work without this flag.", is_ours=True))
    api: tuple[str, ...] = field(default=(), metadata=flag(HTTP, "Where to serve an API (openai, anthropic, ollama, tgi, llamacpp, console, or one of an installed package: docs/add-an-api.md): on, off, or on a port of its own. All APIs are on by default; the console only if HTTP listens on loopback. Repeat for several.", metavar="NAME=on|off|PORT", is_ours=True))

    allow_runtime_lora_updating: bool = field(default=False, metadata=flag(HTTP, "Let clients load and unload adapters of language models (LoRA) at /v1/load_lora_adapter and /v1/unload_lora_adapter: directories and GGUF files of this machine. VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in the environment does the same.", is_ours=True))
    allow_grpc: bool = field(default=True, metadata=flag(GRPC, "Serve gRPC."))
    grpc_address: str = field(default="", metadata=flag(GRPC, "Address to listen on; empty: that of --host (Triton: 0.0.0.0).", metavar="ADDRESS"))
    grpc_port: int = field(default=8001, metadata=flag(GRPC, "Port to listen on; 0 picks a free one.", **_PORT))
    grpc_max_request_size: int = field(default=_INT_MAX, metadata=flag(GRPC, "Largest request message in bytes.", minimum=1, maximum=_INT_MAX, is_ours=True))
    grpc_infer_response_compression_level: str = field(default="none", metadata=flag(GRPC, "Compression level of responses.", choices=_LEVELS))
    grpc_keepalive_time: int = field(default=7_200_000, metadata=flag(GRPC, "Milliseconds of silence before the server pings.", minimum=1))
    grpc_keepalive_timeout: int = field(default=20_000, metadata=flag(GRPC, "Milliseconds to wait for the answer to a ping.", minimum=1))
    grpc_keepalive_permit_without_calls: bool = field(default=False, metadata=flag(GRPC, "Send pings even without an active call."))
    grpc_http2_max_pings_without_data: int = field(default=2, metadata=flag(GRPC, "Pings to send without data between them.", minimum=0))
    grpc_http2_min_recv_ping_interval_without_data: int = field(default=300_000, metadata=flag(GRPC, "Milliseconds that a client must leave between pings.", minimum=0))
    grpc_http2_max_ping_strikes: int = field(default=2, metadata=flag(GRPC, "Bad pings before a connection is closed.", minimum=0))
    grpc_max_connection_age: int | None = field(default=None, metadata=flag(GRPC, "Milliseconds after which a connection is closed, for load balancing.", minimum=1))
    grpc_max_connection_age_grace: int | None = field(default=None, metadata=flag(GRPC, "Milliseconds that calls on such a connection then have to finish.", minimum=1))
    reuse_grpc_port: bool = field(default=False, metadata=flag(GRPC, "Share the port with other processes (SO_REUSEPORT)."))
    grpc_header_forward_pattern: str = field(default="", metadata=flag(GRPC, "Metadata to pass to models as request parameters. The pattern may match anywhere in a key and ignores case.", metavar="REGEX"))
    grpc_infer_thread_count: int = field(default=2, metadata=flag(GRPC, "One event loop serves all calls, whatever the value.", state=_NOT_YET, minimum=1))
    grpc_infer_allocation_pool_size: int = field(default=8, metadata=flag(GRPC, "Messages kept for reuse; ours are not.", state=_NOT_YET, minimum=0))
    grpc_max_response_pool_size: int = field(default=_INT_MAX, metadata=flag(GRPC, "Responses of a stream kept for a slow reader; ours wait for it.", state=_NOT_YET, minimum=1, refusal="Error: --grpc-max-response-pool-size must be greater than 0."))
    grpc_use_ssl: bool = field(default=False, metadata=flag(GRPC, "Serve TLS on the gRPC port, and serve gRPC on that port only."))
    grpc_use_ssl_mutual: bool = field(default=False, metadata=flag(GRPC, "As --grpc-use-ssl, and clients must present a certificate signed by an authority in --grpc-root-cert."))
    grpc_server_cert: str = field(default="", metadata=flag(GRPC, "Certificate of the server for --grpc-use-ssl. Read again when it changes.", metavar="FILE"))
    grpc_server_key: str = field(default="", metadata=flag(GRPC, "Private key of --grpc-server-cert.", metavar="FILE"))
    grpc_root_cert: str = field(default="", metadata=flag(GRPC, "Certificates of authorities for --grpc-use-ssl-mutual. Every client must present a certificate signed by one of them.", metavar="FILE"))
    grpc_restricted_protocol: tuple[str, ...] = field(default=(), metadata=flag(GRPC, "Groups of methods that require the metadata triton-grpc-protocol-KEY with this value; the groups are those of --http-restricted-api. Repeat for several.", metavar="API[,API...]:KEY=VALUE"))

    allow_metrics: bool = field(default=True, metadata=flag(METRICS, "Serve metrics for Prometheus."))
    metrics_address: str = field(default="", metadata=flag(METRICS, "Address to listen on; empty: that of HTTP.", metavar="ADDRESS"))
    metrics_port: int = field(default=8002, metadata=flag(METRICS, "Port to listen on; 0 picks a free one.", **_PORT))
    allow_cpu_metrics: bool = field(default=True, metadata=flag(METRICS, "Report the CPU and memory of the host, or of the container the server runs in."))
    allow_gpu_metrics: bool = field(default=True, metadata=flag(METRICS, "Report the GPUs, where nvidia-ml-py is installed and a driver runs."))
    metrics_interval_ms: int = field(default=2000, metadata=flag(METRICS, "Shortest time between two readings of the host's metrics, in milliseconds.", minimum=1))
    metrics_config: tuple[str, ...] = field(default=(), metadata=flag(METRICS, "counter_latencies, histogram_latencies: false leaves those families out. summary_latencies: true adds quantiles of the last minute; summary_quantiles: their list, as QUANTILE:ERROR,...", metavar="KEY=VALUE"))

    trace_config: tuple[str, ...] = field(default=(), metadata=flag(TRACING, "Settings of request tracing: mode=triton or opentelemetry, level=TIMESTAMPS or TENSORS, rate=N, count=N; triton,file=FILE, triton,log-frequency=N; opentelemetry,url=URL, opentelemetry,protocol=http/protobuf or grpc, opentelemetry,sampler=NAME[:RATIO], opentelemetry,resource=KEY=VALUE, opentelemetry,bsp_max_queue_size, bsp_schedule_delay, bsp_max_export_batch_size. Repeat for several.", metavar="[MODE],KEY=VALUE"))

    cache_config: tuple[str, ...] = field(default=(), metadata=flag(CACHE, "The response cache for models with response_cache.enable, and its settings: local,size=BYTES and optionally ttl=SECONDS (ours); redis,host=NAME and the settings in docs/response-cache.md. Repeat for several settings, or separate them by commas.", metavar="CACHE,KEY=VALUE"))
    cache_directory: str = field(default="", metadata=flag(CACHE, "Directory of cache implementations; both of ours are built in.", state=_NOT_YET, metavar="DIRECTORY"))
    rate_limit: str = field(default="off", metadata=flag(CACHE, "execution_count: instances execute only while they hold the resources that their rate_limiter names, and the instance with the fewest executions goes first.", choices=("off", "execution_count")))
    rate_limit_resource: tuple[str, ...] = field(default=(), metadata=flag(CACHE, "Available units of a resource, on each device or on one. Without this flag, each resource has as many units as the most demanding instance needs; with it, only the given resources exist. Repeat for several.", metavar="NAME:COUNT[:DEVICE]"))

    allow_client_shm: bool = field(default=False, metadata=flag(MEMORY, "Let clients register system shared memory for the tensors of their requests. Anyone who can send requests can then make the server read and write any object of /dev/shm that it may open."))
    pinned_memory_pool_byte_size: int = field(default=256 << 20, metadata=flag(MEMORY, "Pool of page-locked memory; backends take what they need.", state=_NOT_YET, minimum=0))
    cuda_memory_pool_byte_size: tuple[str, ...] = field(default=(), metadata=flag(MEMORY, "Pool of a GPU; batches take what they need, freed memory is used again.", state=_NOT_YET, metavar="GPU:BYTES"))
    cuda_virtual_address_size: tuple[str, ...] = field(default=(), metadata=flag(MEMORY, "Address space of that pool.", state=_NOT_YET, metavar="GPU:BYTES"))
    min_supported_compute_capability: float = field(default=6.0, metadata=flag(MEMORY, "GPUs below this compute capability are not used, if nvidia-ml-py is installed.", minimum=0))
    buffer_manager_thread_count: int = field(default=0, metadata=flag(MEMORY, "Threads that gather inputs; here the worker does it.", state=_NOT_YET, minimum=0))
    enable_peer_access: bool = field(default=True, metadata=flag(MEMORY, "Let GPUs read each other's memory.", state=_NOT_YET))
    host_policy: tuple[str, ...] = field(default=(), metadata=flag(MEMORY, "Cores of a host policy, on which instances of groups that name it run: numa-node=NUMBER or cpu-cores=0-3,8. The policies cpu and gpu_<id> are those of groups that name none. Repeat for several.", metavar="POLICY,KEY=VALUE"))
    model_load_gpu_limit: tuple[str, ...] = field(default=(), metadata=flag(MEMORY, "Fraction of a GPU's memory, 0 to 1, in use above which no model is loaded on it; needs nvidia-ml-py. Repeat for several.", metavar="DEVICE:FRACTION"))

    allow_sagemaker: bool = field(default=False, metadata=flag(CLOUDS, "Serve SageMaker's endpoints /ping and /invocations, the latter for the model named by SAGEMAKER_TRITON_DEFAULT_MODEL_NAME, or for the only model."))
    sagemaker_port: int = field(default=8080, metadata=flag(CLOUDS, "Port of SageMaker's endpoints.", **_PORT))
    sagemaker_safe_port_range: str = field(default="", metadata=flag(CLOUDS, "Ports that SageMaker leaves free; the HTTP, gRPC and metrics ports must be in this range.", metavar="LOW-HIGH"))
    sagemaker_thread_count: int = field(default=8, metadata=flag(CLOUDS, "One event loop serves them, whatever this says.", state=_NOT_YET, minimum=1))
    allow_vertex_ai: bool = field(default=False, metadata=flag(CLOUDS, "Serve Vertex AI's endpoints, at the paths in AIP_HEALTH_ROUTE and AIP_PREDICT_ROUTE."))
    vertex_ai_port: int = field(default=8080, metadata=flag(CLOUDS, "Port of Vertex AI's endpoints.", **_PORT))
    vertex_ai_thread_count: int = field(default=8, metadata=flag(CLOUDS, "One event loop serves them, whatever this says.", state=_NOT_YET, minimum=1))
    vertex_ai_default_model: str = field(default="", metadata=flag(CLOUDS, "Model for Vertex AI's predict route; empty: the only model.", metavar="NAME"))

    strict_model_config: bool = field(default=False, metadata=flag(DEPRECATED, "As --disable-auto-complete-config.", state=_OLD))
    response_cache_byte_size: int = field(default=0, metadata=flag(DEPRECATED, "As --cache-config=local,size=BYTES.", state=_OLD, minimum=0))
    trace_file: str = field(default="", metadata=flag(DEPRECATED, "As --trace-config=triton,file=FILE.", state=_OLD, metavar="FILE"))
    trace_level: tuple[str, ...] = field(default=(), metadata=flag(DEPRECATED, "As --trace-config=level=LEVEL.", state=_OLD, metavar="LEVEL"))
    trace_rate: int = field(default=_TRACE_RATE, metadata=flag(DEPRECATED, "As --trace-config=rate=N.", state=_OLD, minimum=1))
    trace_count: int = field(default=_TRACE_COUNT, metadata=flag(DEPRECATED, "As --trace-config=count=N.", state=_OLD, minimum=-1))
    trace_log_frequency: int = field(default=0, metadata=flag(DEPRECATED, "As --trace-config=triton,log-frequency=N.", state=_OLD, minimum=0))
    # fmt: on

    def __post_init__(self) -> None:
        for text in self.backend_config:
            _split_backend_setting(text)
        for text in self.metrics_config:
            _split_metrics_setting(text)
        parse_api_choices(self.api)
        parse_cache_config(self.cache_config, self.response_cache_byte_size)
        parse_config_limits(self.config_limits)
        parse_resource_limits(self.rate_limit_resource)
        parse_host_policies(self.host_policy)
        parse_gpu_limits(self.model_load_gpu_limit)
        _check_gpu_bytes(self)
        if self.load_model and self.model_control_mode != "explicit":
            raise InvalidArgumentError(
                "Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as well: in the other "
                "modes all models are loaded"
            )
        _check_clouds(self)
        _check_ports(self)
        _check_tls(self)
        self.http_access, self.http_cors, self.grpc_access, self.trace_options, self.default_caller_limits, self.leader  # noqa: B018 - raise for no rule
        missing = [path for path in self.backend_directory if not Path(path).is_dir()]
        if missing:
            raise InvalidArgumentError(f"--backend-directory: directory {missing[0]} does not exist")
        if self.node_rank >= self.nnodes:
            raise InvalidArgumentError(f"--node-rank={self.node_rank}: expected less than --nnodes={self.nnodes}")
        if self.nnodes > 1 and not self.master_addr:
            raise InvalidArgumentError(f"--nnodes={self.nnodes} needs --master-addr=HOST[:PORT], the leader's address")
        if self.model_name and len(self.model_repository) > 1:
            raise InvalidArgumentError("--model-name needs a single --model-repository: the model's own directory")

    @property
    def leader(self) -> tuple[str, int]:
        """Host and port of the leader of several machines."""
        parts = urlsplit(f"//{self.master_addr}")
        try:
            return parts.hostname or "", parts.port or self.master_port
        except ValueError as error:
            raise InvalidArgumentError(f"--master-addr={self.master_addr}: expected HOST[:PORT]: {error}") from None

    @property
    def http_host(self) -> str:
        """The address of HTTP and of the clouds' endpoints."""
        return self.http_address or self.host

    @property
    def grpc_host(self) -> str:
        return self.grpc_address or self.host

    @property
    def metrics_host(self) -> str:
        return self.metrics_address or self.http_host

    @property
    def is_one_port(self) -> bool:
        """HTTP and gRPC have the same address."""
        same = self.http_port == self.grpc_port != 0 and self.http_host == self.grpc_host
        return same and self.allow_http and self.allow_grpc

    @property
    def is_grpc_tls(self) -> bool:
        """The gRPC port has a certificate of its own; Triton's second flag includes the first."""
        return self.grpc_use_ssl or self.grpc_use_ssl_mutual

    @property
    def api_choices(self) -> dict[str, ApiChoice]:
        """The choices of --api, by the names of APIs."""
        return parse_api_choices(self.api)

    @property
    def default_caller_limits(self) -> CallerLimits:
        """The limits of callers without limits of their own."""
        return parse_limits_flag("--caller-limits", self.caller_limits)

    @property
    def knows_callers(self) -> bool:
        """Whether requests are attributed to callers."""
        if self.callers_by == "key":
            return bool(self.api_keys_file)
        return bool(parse_callers_by("--callers-by", self.callers_by))

    @property
    def cache_settings(self) -> CacheSettings | None:
        """The requested response cache; None if no cache was requested."""
        return parse_cache_config(self.cache_config, self.response_cache_byte_size)

    @property
    def http_access(self) -> Access:
        """The access rules of HTTP, and the headers to forward."""
        return self._access("--http-restricted-api", self.http_restricted_api, self.http_header_forward_pattern)

    @property
    def http_cors(self) -> Cors:
        """The web pages that may call over HTTP."""
        return parse_cors("--http-cors-origin", self.http_cors_origin, allows_credentials=self.http_cors_credentials)

    @property
    def grpc_access(self) -> Access:
        """As `http_access`, over gRPC."""
        restricted, forwarded = self.grpc_restricted_protocol, self.grpc_header_forward_pattern
        return self._access("--grpc-restricted-protocol", restricted, forwarded, prefix="triton-grpc-protocol-")

    def _access(self, flag_name: str, restricted: tuple[str, ...], forwarded: str, **of_protocol: str) -> Access:
        return parse_access(
            flag_name,
            restricted,
            forwarded,
            reads_context=self.trace_options.mode == OPENTELEMETRY,
            keys_file=self.api_keys_file,
            is_logged=self.access_log,
            callers_by=parse_callers_by("--callers-by", self.callers_by),
            objectives=parse_objectives("--inference-objectives", self.inference_objectives),
            **of_protocol,
        )

    @property
    def trace_options(self) -> TraceOptions:
        """The initial trace settings and the destination. --trace-config wins over the older flags."""
        return parse_trace_config((*self._older_trace_settings(), *self.trace_config))

    def _older_trace_settings(self) -> Iterator[str]:
        """The older flags in use as settings of --trace-config, without settings that --trace-config gives itself."""
        given = {text.partition("=")[0] for text in self.trace_config}
        if "level" not in given:
            yield from (f"level={level}" for level in self.trace_level)
        for key, value, default in (
            ("triton,file", self.trace_file, ""),
            ("rate", self.trace_rate, _TRACE_RATE),
            ("count", self.trace_count, _TRACE_COUNT),
            ("triton,log-frequency", self.trace_log_frequency, 0),
        ):
            if value != default and key not in given:
                yield f"{key}={value}"

    @property
    def limits_of_configs(self) -> ConfigLimits:
        """The largest numbers that a model's config may have."""
        return parse_config_limits(self.config_limits)

    @property
    def resource_limits(self) -> tuple[ResourceLimit, ...]:
        """The resources that rate limiters share."""
        return parse_resource_limits(self.rate_limit_resource)

    @property
    def gpu_limits(self) -> Mapping[int, float]:
        """The fraction of memory up to which each GPU gets models."""
        return parse_gpu_limits(self.model_load_gpu_limit)

    @property
    def host_policies(self) -> tuple[HostPolicy, ...]:
        """The cores of groups of instances, by host policy."""
        return parse_host_policies(self.host_policy)

    @property
    def backend_options(self) -> dict[str, dict[str, str]]:
        """Settings by backend; settings for all backends are under the empty name."""
        settings: dict[str, dict[str, str]] = {}
        for text in self.backend_config:
            backend, key, value = _split_backend_setting(text)
            settings.setdefault(backend, {})[key] = value
        if self.allow_pickle_models:
            settings.setdefault("", {})["allow-pickle"] = "true"
        return settings

    @property
    def metrics_settings(self) -> dict[str, str]:
        """The settings of `--metrics-config`, by key."""
        return dict(_split_metrics_setting(text) for text in self.metrics_config)

    @property
    def metrics_switches(self) -> dict[str, bool]:
        """The families of metrics that can be switched, and whether they are on."""
        given = self.metrics_settings
        return {
            key: default if (switch := parse_bool(given.get(key, ""))) is None else switch
            for key, default in _METRICS_SWITCHES.items()
        }

    @property
    def summary_quantiles(self) -> tuple[float, ...]:
        """The quantiles of the summaries of durations; empty without summaries."""
        if not self.metrics_switches["summary_latencies"]:
            return ()
        given = self.metrics_settings.get("summary_quantiles")
        return DEFAULT_QUANTILES if given is None else parse_quantiles(given)

    @property
    def auto_complete_config(self) -> bool:
        """Whether backends complete a partial config.pbtxt."""
        return not (self.disable_auto_complete_config or self.strict_model_config)


def _check_gpu_bytes(options: ServerOptions) -> None:
    """Check the form of memory sizes: they have no effect here, but Triton refuses malformed ones."""
    for name in ("cuda_memory_pool_byte_size", "cuda_virtual_address_size"):
        for text in getattr(options, name):
            device, _, size = text.partition(":")
            if not (f"{device}{size}".isascii() and device.isdecimal() and size.isdecimal()):
                raise InvalidArgumentError(f"{_flag_name(name)} expects GPU:BYTES, as 0:67108864, got '{text}'")


def _check_ports(options: ServerOptions) -> None:
    if options.wire_processes > 1 and options.wire != "native":
        raise InvalidArgumentError(
            f"--wire-processes={options.wire_processes} needs --wire=native: the reference wire is served by one process"
        )
    if not options.is_one_port:
        return
    port = f"--http-port and --grpc-port are both {options.http_port}"
    if options.wire != "native":
        raise InvalidArgumentError(f"{port}: only --wire=native carries both protocols on one port")
    if not options.shared_ports:
        raise InvalidArgumentError(f"{port}: --shared-ports=false needs two ports")
    if options.is_grpc_tls:
        raise InvalidArgumentError(
            f"{port}: --grpc-use-ssl is for a gRPC port of its own; use --tls-cert and --tls-key for a shared port"
        )


# Triton's names for the servers of ports.
_SERVICES = {"http": "HTTP", "grpc": "GRPC"}


def _check_clouds(options: ServerOptions) -> None:
    text = options.sagemaker_safe_port_range
    if not text:
        return
    low, dash, high = text.partition("-")
    if not dash or not is_digits(low) or not is_digits(high) or int(low) > int(high):
        raise InvalidArgumentError(f"--sagemaker-safe-port-range expects LOW-HIGH, such as 9000-9999, got '{text}'")
    for name in ("http", "grpc", "metrics"):
        port = getattr(options, f"{name}_port")
        if options.allow_sagemaker and getattr(options, f"allow_{name}") and not int(low) <= port <= int(high):
            raise InvalidArgumentError(
                f"The server cannot listen to {_SERVICES.get(name, name)} requests at port {port}, allowed port range is "
                f"[{low}, {high}]: --{name}-port={port} is not within --sagemaker-safe-port-range={text}"
            )


def _check_tls(options: ServerOptions) -> None:
    """Check flags that need each other. The content of the files is checked when they are read."""
    for flags, needed in (
        (("tls_cert", "tls_key", "tls_client_ca"), ("tls_cert", "tls_key")),
        (("grpc_use_ssl", "grpc_use_ssl_mutual"), ("grpc_server_cert", "grpc_server_key")),
        (("grpc_use_ssl_mutual",), ("grpc_root_cert",)),
    ):
        given = [name for name in flags if getattr(options, name)]
        missing = [name for name in needed if not getattr(options, name)]
        if given and options.wire != "native":
            raise InvalidArgumentError(
                f"{_flag_name(given[0])} needs --wire=native: --wire=grpcio does not do TLS here"
            )
        if given and missing:
            raise InvalidArgumentError(f"{_flag_name(given[0])} needs {_flag_name(missing[0])}: say which file it is")


def _flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def _split_backend_setting(text: str) -> tuple[str, str, str]:
    """`onnxruntime,threads=2` -> backend, key, value; `threads=2` is for all backends."""
    head, equals, value = text.partition("=")
    backend, comma, key = head.partition(",")
    if not comma:
        backend, key = "", head
    if not equals or not key.strip() or not value or (comma and not backend.strip()):
        raise bad_format("--backend-config", "<backend name>,<setting>=<value>' or '<setting>=<value>", text)
    return backend.strip(), key.strip(), value


def _split_metrics_setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise bad_format("--metrics-config", "<setting>=<value>", text)
    known = (*_METRICS_SWITCHES, "summary_quantiles")
    if key not in known:
        raise InvalidArgumentError(
            f"--metrics-config expects one of {', '.join(known)}, got '{key}'{nearest_hint(key, known)}"
        )
    if key in _METRICS_SWITCHES and parse_bool(value) is None:
        raise InvalidArgumentError(f"--metrics-config={key} expects {BOOL_EXPECTATION}, got '{value}'")
    if key == "summary_quantiles":
        parse_quantiles(value)
    return key, value
