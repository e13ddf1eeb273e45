"""The frontends of a front process, which get their answers from the core.

Inference is decoded here, by the same handlers as in the core, over a `RemoteDataPlane`; every other request goes to
the core unchanged. Only the requirements of those are known here: no body is taken from a client without a key.
"""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from modelserver.auth.access import WITHOUT_KEY, Admitted
from modelserver.auth.api_keys import KeyRing, open_keys
from modelserver.auth.guard import Guard
from modelserver.execution.process.shared_buffer import SharedBuffer
from modelserver.frontends.grpc.access_log import with_access_log as with_grpc_log
from modelserver.frontends.grpc.frontend import GrpcFrontend, guarded
from modelserver.frontends.grpc.inference import Inference as GrpcInference
from modelserver.frontends.http.access_log import with_access_log as with_http_log
from modelserver.frontends.http.cors import PageGuard, with_cors
from modelserver.frontends.http.frontend import HttpFrontend
from modelserver.frontends.http.inference import Inference
from modelserver.planes.authorized import AuthorizedInferPlane
from modelserver.planes.data import InferPlane
from modelserver.protocol.api import Api, Route
from modelserver.protocol.call import Service
from modelserver.protocol.exchange import HttpExchange, HttpHandler, HttpHead
from modelserver.protocol.kserve import ASKING_HEADER, JSON_LEN_HEADER, SERVICE
from modelserver.protocol.limits import GrpcLimits, HttpLimits
from modelserver.protocol.response import PLAIN_ERRORS, ErrorWriter, HttpResponse
from modelserver.telemetry.log_settings import set_own_level
from modelserver.wire.processes.forwarding import ForwardedCalls, GrpcForwarder
from modelserver.wire.processes.link import Link
from modelserver.wire.processes.messages import (
    CoreBundle,
    Drain,
    Failed,
    Inferred,
    LogLevel,
    Retire,
    ShortFailure,
    ShortReply,
    ShortResponse,
)
from modelserver.wire.processes.remote import RemoteDataPlane
from modelserver.wire.processes.setup import ApiCalls, FrontCalls
from modelserver.wire.processes.short_calls import ShortCalls, is_open

_logger = logging.getLogger(__name__)

_KSERVE: Final = "KServe"


class HttpForwarder(HttpHandler):
    """`local` decodes and answers inference; the core does the rest, whose routes `whole` knows."""

    def __init__(
        self, local: HttpFrontend, whole: HttpFrontend, calls: ForwardedCalls, *, foreign: frozenset[str] = frozenset()
    ) -> None:
        """`foreign` are the APIs whose errors only the core can write."""
        self._local = local
        self._whole = whole
        self._calls = calls
        self._foreign = foreign

    def handle(self, exchange: HttpExchange) -> None:
        """Answer `exchange`, now or later; never raises."""
        head = exchange.head
        # Only the local frontend leaves a memo: it was asked with this very head before.
        if head.memo is not None or (self._local.serves(head) and not _needs_model(head.headers)):
            self._local.handle(exchange)
        else:
            self._calls.http(exchange)

    def check_head(self, head: HttpHead, peer: str) -> Admitted | HttpResponse:
        """For every request, also for those that the core answers, because their bodies arrive here."""
        checked = self._whole.check_head(head, peer)
        if isinstance(checked, HttpResponse) and self._whole.api(head.path).name in self._foreign:
            return WITHOUT_KEY  # the core refuses it, in its API's form
        # Bodies go to the core whole.
        return checked if isinstance(checked, HttpResponse) else replace(checked, open_body=None)

    def errors(self, path: str) -> ErrorWriter:
        return self._whole.errors(path)


def _needs_model(headers: Mapping[str, str]) -> bool:
    """Whether the call depends on the model, which only the core has.

    The model's config describes a body that is a single tensor, and decides whether an answer is a stream of events; a
    client may also ask for the model's load.
    """
    text = headers.get(JSON_LEN_HEADER)
    is_raw = text is not None and not text.strip("0")
    return is_raw or ASKING_HEADER in headers or "text/event-stream" in headers.get("accept", "")


class Core:
    """`http` and `grpc` are frontends for any number of ports. Made and used on the running event loop."""

    def __init__(
        self,
        descriptors: Sequence[int],
        http_limits: HttpLimits,
        grpc_limits: GrpcLimits,
        calls: FrontCalls,
        *,
        drain: Callable[[float], None],
        retire: Callable[[], None] = lambda: None,
    ) -> None:
        """`descriptors`: the link, the memory that this process writes, and that of the core. `calls`: what it answers.

        `drain` is called with the seconds of grace when the core wants this process to end, or is gone; `retire` before
        that, when clients should go elsewhere.
        """
        connection, outgoing, incoming = descriptors
        self._drain = drain
        self._retire = retire
        self.link = Link(
            "the core",
            socket.socket(fileno=connection),
            SharedBuffer(outgoing),
            SharedBuffer(incoming),
            kind=CoreBundle,
            receive=self._receive,
            lost=self._lose,
        )
        numbers = itertools.count(1)
        self._calls = ForwardedCalls(self.link, numbers)
        self.dataplane = RemoteDataPlane(self.link, numbers, is_on=http_limits.recognizes)
        # The core checks forwarded calls.
        keys = open_keys(http_limits.access.keys_file)
        plane: InferPlane = self.dataplane if keys is None else AuthorizedInferPlane(self.dataplane, keys)
        self._short = ShortCalls(self.link, numbers, is_on=http_limits.recognizes)
        self.http = self._make_http(plane, http_limits, calls, keys)
        self.grpc = self._make_grpc(plane, grpc_limits, calls, keys)

    def _make_http(self, plane: InferPlane, limits: HttpLimits, calls: FrontCalls, keys: KeyRing | None) -> HttpHandler:
        guard = Guard(limits.access, keys)
        inference = Api(_KSERVE, Inference(plane, limits).routes())
        infer = HttpFrontend([inference], guard, PageGuard(limits.cors))
        writers = {api.name: api.error_writer() for api in calls.apis}
        known = [self._forwarded(api, writers[api.name] or PLAIN_ERRORS) for api in calls.apis]
        forwarder = HttpForwarder(
            infer,
            HttpFrontend(known or [inference], guard),
            self._calls,
            foreign=frozenset(name for name, writer in writers.items() if writer is None),
        )
        http = with_http_log(forwarder, is_logged=limits.access.is_logged, keys=keys)
        if is_open(limits.access):
            http = self._short.http(infer.serves, http)
        return with_cors(http, limits.cors)

    def _forwarded(self, api: ApiCalls, errors: ErrorWriter) -> Api:
        """An API whose calls the core answers."""
        routes = tuple(
            Route(
                route.method,
                route.pattern,
                self._calls.route,
                *route.needs.parts,
                model=route.model,
            )
            for route in api.routes
        )
        return Api(api.name, routes, errors, beginnings=api.beginnings)

    def _make_grpc(
        self, plane: InferPlane, limits: GrpcLimits, calls: FrontCalls, keys: KeyRing | None
    ) -> GrpcForwarder:
        guard = Guard(limits.access, keys)
        inference = GrpcInference(plane, limits)
        service = Service(SERVICE, inference.methods, drain=inference.drain)
        forwarded = {}
        for call in calls.methods:
            method = self._calls.grpc(call)
            # The core admits the call; here its head is looked at, before its message comes.
            forwarded[call.path] = replace(method, check_head=guarded(call.path, method, guard).check_head)
        return GrpcForwarder(
            GrpcFrontend([service], guard, is_logged=limits.access.is_logged),
            with_grpc_log(forwarded, is_logged=limits.access.is_logged, keys=keys),
            short=self._short if is_open(limits.access) else None,
        )

    @property
    def num_inflight(self) -> int:
        """The calls that the core has not answered."""
        return self.dataplane.num_inflight + self._short.num_inflight + self._calls.num_inflight

    def _receive(self, messages: Sequence[Any]) -> None:
        for message in messages:
            kind = type(message)
            if kind is ShortReply:
                self._short.on_reply(message)
            elif kind is ShortResponse:
                self._short.on_response(message)
            elif kind is Inferred:
                self.dataplane.on_inferred(message)
            elif kind is ShortFailure:
                self._short.on_failure(message)
            elif kind is Failed:
                self.dataplane.on_failed(message)
            elif kind is Drain:
                self._drain(message.grace_s)
            elif kind is Retire:
                self._retire()
            elif kind is LogLevel:
                set_own_level(message.level)
                _logger.debug("logs from level %s on", logging.getLevelName(message.level))
            else:
                self._calls.receive(message)

    def _lose(self) -> None:
        _logger.error("the core is gone")
        self._drain(0.0)
