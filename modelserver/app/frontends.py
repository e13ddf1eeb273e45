"""The frontends of a server: which APIs and services it has, those of installed packages among them, on
which ports, behind one guard for each protocol."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from modelserver.api import ApiContext, ApiFactory
from modelserver.app.ports import (
    METRICS,
    OLLAMA,
    Frontends,
    OwnPort,
    grpc_limits,
    http_limits,
    own_address,
    vertex_ai_port,
)
from modelserver.auth.access import Access, is_loopback
from modelserver.auth.api_keys import KeyRing
from modelserver.auth.guard import Guard
from modelserver.core.spelling import nearest_hint
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.anthropic.routes import Anthropic
from modelserver.frontends.console.routes import CONSOLE, console_api
from modelserver.frontends.grpc.frontend import GrpcFrontend
from modelserver.frontends.grpc.health import Health
from modelserver.frontends.grpc.kserve import KServe as GrpcKServe
from modelserver.frontends.grpc.reflection import Reflection
from modelserver.frontends.http.access_log import with_access_log
from modelserver.frontends.http.clouds import sagemaker_api, vertex_ai_api
from modelserver.frontends.http.cors import PageGuard, with_cors
from modelserver.frontends.http.frontend import HttpFrontend
from modelserver.frontends.http.kserve import KServe
from modelserver.frontends.http.metrics import Metrics
from modelserver.frontends.llamacpp.routes import LlamaCpp
from modelserver.frontends.ollama.routes import Ollama
from modelserver.frontends.openai.batches.service import BatchService, endpoint_handlers
from modelserver.frontends.openai.routes import OpenAi
from modelserver.frontends.openapi.routes import OpenApi
from modelserver.frontends.predict.routes import Predict
from modelserver.frontends.tgi.routes import Tgi
from modelserver.options.flags import FLAG, ApiChoice
from modelserver.options.server_options import ServerOptions
from modelserver.planes.authorized import AnyControlPlane, AnyDataPlane, authorized_planes
from modelserver.planes.control import ControlPlane
from modelserver.planes.data import DataPlane
from modelserver.protocol.api import Api
from modelserver.protocol.exchange import HttpHandler
from modelserver.protocol.limits import DEFAULT_GRPC_LIMITS, GrpcLimits, HttpLimits
from modelserver.telemetry.metrics import ServerMetrics
from modelserver.wire.address import Address

logger = logging.getLogger(__name__)

# Servers whose clients call them by OpenAI's API, too.
_BESIDE_OPENAI = ("TGI", "llamacpp")


def http_apis(
    dataplane: AnyDataPlane, controlplane: AnyControlPlane, limits: HttpLimits, batches: BatchService | None = None
) -> tuple[Api, ...]:
    """The APIs of the HTTP port. The first one answers for paths that belong to no API."""
    return (
        KServe(dataplane, controlplane, limits).api(),
        OpenAi(dataplane, controlplane, limits, batches).api(),
        Anthropic(dataplane, limits).api(),
        Ollama(dataplane, controlplane, limits).api(),
        Tgi(dataplane, limits).api(),
        LlamaCpp(dataplane, limits).api(),
        Predict(dataplane, controlplane, limits).api(),
        console_api(),
    )


def http_frontend(
    dataplane: DataPlane,
    controlplane: ControlPlane,
    limits: HttpLimits | None = None,
    keys: KeyRing | None = None,
) -> HttpFrontend:
    """The APIs of the HTTP port, and no others, behind their guard."""
    limits = limits or HttpLimits()
    planes = authorized_planes(dataplane, controlplane, keys)
    return HttpFrontend(http_apis(*planes, limits), Guard(limits.access, keys), PageGuard(limits.cors))


def grpc_frontend(
    dataplane: DataPlane,
    controlplane: ControlPlane,
    limits: GrpcLimits = DEFAULT_GRPC_LIMITS,
    keys: KeyRing | None = None,
    *,
    health_watch_interval_s: float = 0.5,
) -> GrpcFrontend:
    """KServe's service, grpc.health.v1, and reflection of both, behind their guard."""
    planes = authorized_planes(dataplane, controlplane, keys)
    services = (
        GrpcKServe(*planes, limits).service(),
        Health(planes[0], watch_interval_s=health_watch_interval_s).service(),
    )
    guard = Guard(limits.access, keys)
    return GrpcFrontend((*services, *Reflection(services).services()), guard, is_logged=limits.access.is_logged)


class ServerFrontends:
    """Makes them over the planes of one server."""

    def __init__(
        self,
        options: ServerOptions,
        dataplane: DataPlane,
        controlplane: ControlPlane,
        keys: KeyRing | None,
        apis: Mapping[str, ApiFactory],
    ) -> None:
        self._options = options
        self._apis = apis
        self._dataplane = dataplane
        self._controlplane = controlplane
        self._keys = keys
        self._planes = authorized_planes(dataplane, controlplane, keys)
        self._limits = http_limits(options)
        self._guard = Guard(self._limits.access, keys)
        self._pages = PageGuard(self._limits.cors)
        self.batches = self._batch_service()

    def make(self, metrics: ServerMetrics) -> Frontends:
        """The frontends that the options ask for. Raises InvalidArgumentError for an API that cannot be made."""
        options = self._options
        kserve, *optional = http_apis(*self._planes, self._limits, self.batches)
        choices = options.api_choices
        if CONSOLE not in choices and not is_loopback(options.http_host):
            choices[CONSOLE] = ApiChoice(is_served=False)
        docs = self._docs()
        further = [*installed_apis(self._context, choices), *program_apis(self._context, self._apis)]
        # Paths of the program are its own, whatever the server has there.
        theirs = tuple(route for api in further if api.name in self._apis for route in api.routes)
        optional = [api.without(theirs) for api in optional]
        chosen = chosen_apis([*optional, *further, docs.api()], choices)
        shared = [kserve, *(api for api in chosen if api.port is None)] if options.allow_http else []
        own = [api for api in chosen if api.port is not None]
        page = Metrics(metrics.collect_slices, metrics.load)
        if options.allow_metrics and options.allow_http:
            shared.append(page.api())
        docs.describe(shared)
        return Frontends(
            dataplane=self._dataplane,
            http=self._shared(shared) if shared else None,
            http_apis=tuple(shared),
            grpc=self._grpc() if options.allow_grpc else None,
            own={
                **({METRICS: self._metrics(page)} if options.allow_metrics else {}),
                **{api.name: self._own(api) for api in self._clouds()},
                **{api.name: self._own(api, shared, has_cors=True) for api in own},
                **({OLLAMA: self._ollama()} if options.ollama else {}),
            },
            logs=self._controlplane.logs,
        )

    def _batch_service(self) -> BatchService | None:
        """Files and batches, if there is a directory for them."""
        options = self._options
        if not options.batch_directory:
            return None
        return BatchService(
            Path(options.batch_directory),
            self._dataplane,
            endpoint_handlers(self._planes[0], self._limits),
            self._keys,
            concurrency=options.batch_concurrency,
            max_bytes=options.batch_max_bytes,
        )

    def _context(self, name: str) -> ApiContext:
        """The parts of the server that the installed API of that name gets."""
        return ApiContext(name, *self._planes, self._limits)

    def _docs(self) -> OpenApi:
        return OpenApi(self._planes[0], self._limits.access, has_keys=self._keys is not None)

    def _with_docs(self, apis: list[Api]) -> list[Api]:
        """The APIs of a port of its own, with their description unless it is off, there, or on another port."""
        choice = self._options.api_choices.get("docs", ApiChoice())
        if choice.is_served and choice.port is None and all(api.name != "docs" for api in apis):
            docs = self._docs()
            apis = [*apis, docs.api()]
            docs.describe(apis)
        return apis

    def _shared(self, apis: Sequence[Api]) -> HttpHandler:
        """The frontend of the HTTP port, for one process or several: front processes handle CORS themselves."""
        frontend = with_access_log(HttpFrontend(apis, self._guard, self._pages), is_logged=self._logs_access)
        return with_cors(frontend, self._options.http_cors) if self._options.wire_processes == 1 else frontend

    def _own(self, api: Api, shared: Sequence[Api] = (), *, has_cors: bool = False) -> OwnPort:
        """An API on a port of its own; web pages do not call those of clouds. Clients of some also speak OpenAI's.

        The console calls the APIs of the HTTP port, `shared`, on the port that it comes from.
        """
        apis = [*shared, api] if api.name == CONSOLE else [api]
        if api.name in _BESIDE_OPENAI:
            apis.append(OpenAi(*self._planes, self._limits, self.batches).api().without(api.routes))
        if has_cors:
            apis = self._with_docs(apis)
        frontend = with_access_log(HttpFrontend(apis, self._guard, self._pages), is_logged=self._options.access_log)
        if has_cors:
            frontend = with_cors(frontend, self._options.http_cors)
        return OwnPort(frontend, own_address(self._options, api))

    def _ollama(self) -> OwnPort:
        """The port where Ollama's clients look for a server; some of them speak OpenAI's API there."""
        options, port = self._options, self._options.ollama_port
        openai = OpenAi(*self._planes, self._limits, self.batches).api()
        apis = [Ollama(*self._planes, self._limits).api().on_port(port), openai]
        apis = self._with_docs(apis)
        frontend = with_access_log(HttpFrontend(apis, self._guard, self._pages), is_logged=options.access_log)
        address = Address(options.http_host, port, "--ollama-port", options.reuse_http_port)
        return OwnPort(with_cors(frontend, options.http_cors), address)

    def _metrics(self, page: Metrics) -> OwnPort:
        """The metrics port has no restricted groups, and no line in the access log for each scrape."""
        api = page.api(self._options.metrics_port)
        return OwnPort(HttpFrontend([api], Guard(Access(), self._keys)), own_address(self._options, api))

    def _grpc(self) -> GrpcFrontend:
        limits = grpc_limits(self._options)
        limits = replace(limits, access=replace(limits.access, is_logged=self._logs_access))
        return grpc_frontend(self._dataplane, self._controlplane, limits, self._keys)

    @property
    def _logs_access(self) -> bool:
        """Whether this process writes the access log; front processes write it if there are any."""
        return self._options.access_log and self._options.wire_processes == 1

    def _clouds(self) -> list[Api]:
        options, clouds = self._options, []
        if options.allow_sagemaker:
            clouds.append(self._sagemaker())
        if options.allow_vertex_ai:
            clouds.append(self._vertex_ai())
        return clouds

    def _v2(self) -> Api:
        """The target of clouds' calls."""
        return KServe(*self._planes, self._limits).api()

    def _sagemaker(self) -> Api:
        return sagemaker_api(
            self._v2(),
            self._guard,
            *self._planes,
            self._limits,
            model=os.environ.get("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", ""),
            inference_type=os.environ.get("SAGEMAKER_TRITON_INFERENCE_TYPE") or "infer",
            port=self._options.sagemaker_port,
        )

    def _vertex_ai(self) -> Api:
        paths = [os.environ.get(f"AIP_{name}_ROUTE", "").rstrip("/") for name in ("HEALTH", "PREDICT")]
        if not all(path.startswith("/") for path in paths):
            raise InvalidArgumentError(
                "--allow-vertex-ai needs the environment variables AIP_HEALTH_ROUTE and AIP_PREDICT_ROUTE: the paths "
                "that Vertex AI calls"
            )
        health_path, predict_path = paths
        return vertex_ai_api(
            self._v2(),
            self._guard,
            self._planes[0],
            health_path=health_path,
            predict_path=predict_path,
            model=self._options.vertex_ai_default_model,
            port=vertex_ai_port(self._options),
        )


ENTRY_POINT_GROUP = "modelserver.apis"
# The form that a name also has in scopes of keys.
_OWN_NAMES = frozenset(
    {"kserve", "openai", "anthropic", "ollama", "tgi", "llamacpp", "console", "sagemaker", "metrics", "docs", "predict"}
)
_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}", re.ASCII)


def installed_apis(make_context: Callable[[str], ApiContext], choices: Mapping[str, ApiChoice]) -> list[Api]:
    """The APIs of installed packages, in the order of their names; those that are switched off are not imported.

    Raises InvalidArgumentError, naming the package, for one that cannot be made.
    """
    found = sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda each: each.name)
    names = [entry_point.name for entry_point in found]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        packages = " and ".join(_package(each) for each in found if each.name == repeated)
        raise InvalidArgumentError(f"the API '{repeated}' is there twice, of {packages}: uninstall one of them")
    apis = []
    for entry_point in found:
        choice = choices.get(entry_point.name)
        if choice is None or choice.is_served:
            apis.append(_make(entry_point, make_context))
    return apis


def chosen_apis(apis: Iterable[Api], choices: Mapping[str, ApiChoice]) -> list[Api]:
    """The APIs as `--api` wants them: without those that are off, and with the ports that it names.

    Raises InvalidArgumentError for an unknown name.
    """
    apis = list(apis)
    known = [api.name.lower() for api in apis]
    for name, choice in choices.items():
        if name not in known and (choice.is_served or name not in _installed_names()):
            raise InvalidArgumentError(
                f"{FLAG}: there is no API '{name:.60}', expected one of {', '.join(known)}{nearest_hint(name, known)}"
            )
    chosen = []
    for api in apis:
        choice = choices.get(api.name.lower(), ApiChoice())
        if choice.is_served:
            chosen.append(api if choice.port is None else api.on_port(choice.port))
    return chosen


def program_apis(make_context: Callable[[str], ApiContext], factories: Mapping[str, ApiFactory]) -> list[Api]:
    """The APIs of the program that the server is part of. Raises InvalidArgumentError for a name that is taken."""
    taken = _OWN_NAMES | _installed_names()
    if name := next((name for name in factories if name in taken or not _NAME.fullmatch(name)), None):
        raise InvalidArgumentError(f"the program's API '{name}': the name is taken, or not of a-z, 0-9 and -")
    return [factory(make_context(name)) for name, factory in factories.items()]


def _installed_names() -> set[str]:
    return {entry_point.name for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}


def _make(entry_point: importlib.metadata.EntryPoint, make_context: Callable[[str], ApiContext]) -> Api:
    name = entry_point.name
    where = f"the API '{name}' of {_package(entry_point)} ({entry_point.value})"
    advice = f"fix or uninstall the package, or start with {FLAG}={name}=off"
    if not _NAME.fullmatch(name):
        raise InvalidArgumentError(f"{where}: its name must be of a-z, 0-9 and -, and begin with a letter; {advice}")
    if name in _OWN_NAMES:
        raise InvalidArgumentError(f"{where}: the server itself has an API of that name; {advice}")
    try:
        api = entry_point.load()(make_context(name))
    except Exception as error:
        logger.debug("%s", where, exc_info=True)
        raise InvalidArgumentError(f"{where} cannot be made: {type(error).__name__}: {error}; {advice}") from error
    if not isinstance(api, Api):
        raise InvalidArgumentError(f"{where}: expected an Api, got {type(api).__name__}; {advice}")
    if api.name != name:
        raise InvalidArgumentError(f"{where} is called '{api.name}': expected the name of its entry point; {advice}")
    if not api.routes:
        raise InvalidArgumentError(f"{where} has no routes; {advice}")
    logger.info("%s has %d routes", where, len(api.routes))
    return api


def _package(entry_point: importlib.metadata.EntryPoint) -> str:
    """The distribution, as `pip` names it."""
    return f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist is not None else "a package"
