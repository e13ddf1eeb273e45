"""What the router's ports serve: its own health and metrics; everything else is forwarded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

from grpc_health.v1 import health_pb2

from modelserver.auth.access import EVERYBODY, Admitted
from modelserver.core.body_pipe import BodyPipe, PipedBody
from modelserver.frontends.grpc.edge import answered
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.protocol.call import GrpcHandler, Method
from modelserver.protocol.exchange import HttpExchange, HttpHandler, HttpHead
from modelserver.protocol.response import ErrorWriter, HttpResponse, bare_response, json_response
from modelserver.router.families import errors_of
from modelserver.router.grpc_forward import ForwardedCall
from modelserver.router.http_forward import MAX_HOPS, HttpForward, Passage, Upload
from modelserver.router.replicas import Replicas

# Bodies up to this size are collected before they are sent on: they can be looked at, and sent again.
_MAX_COLLECTED_BYTES: Final = 1 << 20
_KSERVE: Final = "/inference.GRPCInferenceService/"
_HEALTH: Final = "/grpc.health.v1.Health/Check"
ENDPOINTS: Final = "/v2/router/endpoints"

Answer = Callable[[HttpExchange], None]


class RouterFrontend(HttpHandler):
    """HTTP. `metrics` answers for the page of metrics."""

    def __init__(self, replicas: Replicas, metrics: Answer) -> None:
        self._replicas = replicas
        self._own: dict[tuple[str, str], Answer] = {
            ("GET", "/v2/health/live"): self._live,
            ("GET", "/v2/health/ready"): self._ready,
            ("GET", "/health"): self._ready,
            ("GET", "/ping"): self._ready,
            ("GET", "/metrics"): metrics,
            ("GET", ENDPOINTS): self._endpoints,
        }

    def handle(self, exchange: HttpExchange) -> None:
        """Forward the exchange, or answer it."""
        head = exchange.head
        passage = head.memo
        if passage is None:
            own = self._own.get((head.method, head.path))
            if own is not None:
                own(exchange)
                return
            passage = head.memo = Passage(head, exchange.peer)
        assert isinstance(passage, Passage), "only the router keeps something with the head"
        body = exchange.body
        if isinstance(body, PipedBody) and isinstance(body.pipe, Upload):
            body.pipe.attach(exchange)
        elif passage.num_hops >= MAX_HOPS:
            exchange.respond(self._looping(head, passage))
        else:
            HttpForward(self._replicas, head, passage).forward(exchange)

    def check_head(self, head: HttpHead, peer: str) -> Admitted | HttpResponse:
        """Have a large body passed on while it arrives."""
        if (head.method, head.path) in self._own:
            return EVERYBODY
        passage = head.memo
        if not isinstance(passage, Passage):
            passage = head.memo = Passage(head, peer)
        if passage.num_hops >= MAX_HOPS:
            return self._looping(head, passage)
        length = head.headers.get("content-length", "")
        if length.isdigit() and int(length) <= _MAX_COLLECTED_BYTES:
            return EVERYBODY
        return Admitted(open_body=partial(self._open, head, passage))

    def errors(self, path: str) -> ErrorWriter:
        return errors_of(path)

    def _open(self, head: HttpHead, passage: Passage, num_bytes: int | None) -> BodyPipe:
        return Upload(HttpForward(self._replicas, head, passage), num_bytes)

    def _looping(self, head: HttpHead, passage: Passage) -> HttpResponse:
        text = f"the request has passed {passage.num_hops} routers: do they send requests to one another?"
        return errors_of(head.path).refused(508, text)

    def _live(self, exchange: HttpExchange) -> None:
        exchange.respond(bare_response(exchange.head.headers.get("accept"), {"live": True}))

    def _ready(self, exchange: HttpExchange) -> None:
        if self._replicas.is_ready:
            document = {"ready": True, "inflight_requests": self._replicas.endpoints.outstanding}
            exchange.respond(bare_response(exchange.head.headers.get("accept"), document))
        else:
            exchange.respond(json_response({"error": self._replicas.why_not_ready()}, 503))

    def _endpoints(self, exchange: HttpExchange) -> None:
        exchange.respond(json_response(self._replicas.describe()))


class RouterCalls(GrpcHandler):
    """gRPC: every method of every service."""

    def __init__(self, replicas: Replicas) -> None:
        self._methods = _Methods(replicas)

    @property
    def methods(self) -> Mapping[str, Method]:
        return self._methods

    def drain(self) -> None:
        """Streams end when the replica or the client ends them."""


class _Methods(Mapping[str, Method]):
    """The router's own health calls; all others are forwarded, whatever their names.

    `Health/Check` may ask about a model. A replica that is ready answers it; where none is, the router does.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._forwarded = Method(relay=partial(ForwardedCall, replicas))
        self._own = {
            f"{_KSERVE}ServerLive": answered(pb.ServerLiveRequest, lambda _: pb.ServerLiveResponse(live=True)),
            f"{_KSERVE}ServerReady": answered(
                pb.ServerReadyRequest, lambda _: pb.ServerReadyResponse(ready=replicas.is_ready)
            ),
            _HEALTH: answered(health_pb2.HealthCheckRequest, self._check),
        }

    def _check(self, _request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        response = health_pb2.HealthCheckResponse
        return response(status=response.SERVING if self._replicas.is_ready else response.NOT_SERVING)

    def __getitem__(self, path: str) -> Method:
        if path == _HEALTH and self._replicas.has_ready:
            return self._forwarded
        return self._own.get(path, self._forwarded)

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)
