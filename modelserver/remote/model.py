"""A remote model while it is loaded: its endpoints with their connections, health and metrics, and its requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import aclosing, suppress
from typing import Any
from urllib.parse import urlsplit

from modelserver.backend import (
    CancelledError,
    ErrorCode,
    InferRequest,
    InferResponse,
    InternalError,
    InvalidArgumentError,
    Measurement,
    ModelConfig,
    ResponseSender,
    ServerCalls,
    ServerError,
    UnavailableError,
)
from modelserver.client.address import Address
from modelserver.client.call_error import CallError
from modelserver.client.grpc_pool import GrpcPool
from modelserver.client.http_pool import HttpPool, http_lines
from modelserver.core.request import InFlightRequest
from modelserver.endpoints.endpoint import Endpoint, EndpointState, Outcome
from modelserver.endpoints.endpoint_set import EndpointSet
from modelserver.endpoints.membership import Membership, Source, StaticSource, parse_source
from modelserver.endpoints.probes import Prober, ProbeTimes
from modelserver.errors import QueueFullError
from modelserver.protocol.kserve import HOPS
from modelserver.remote.anthropic import AnthropicTransport
from modelserver.remote.calls import RemoteCalls
from modelserver.remote.openai import OpenAiTransport
from modelserver.remote.options import Place, Protocol, RemoteOptions
from modelserver.remote.v2 import GrpcTransport, HttpTransport, Sent, Target, Transport

logger = logging.getLogger(__name__)
MAX_HOPS = 4
SERVED_BY = "x-modelserver-served-by"
# How long the first requests wait for the first list of endpoints.
MEMBERSHIP_TIMEOUT_S = 5.0
_FALLBACK_CODES = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED, ErrorCode.TIMED_OUT})


def make_transport(place: Place, options: RemoteOptions, config: ModelConfig) -> Transport:
    """The way to one endpoint. Called on the event loop that uses it."""
    target = Target(options.model, options.version)
    if place.protocol is Protocol.GRPC:
        pool = GrpcPool(place.address, connect_timeout_s=options.connect_timeout_s)
        return GrpcTransport(pool, target)
    http = HttpPool(place.address, max_connections=options.max_connections, connect_timeout_s=options.connect_timeout_s)
    if place.protocol is Protocol.OPENAI:
        return OpenAiTransport(http, options.model, place.base)
    if place.protocol is Protocol.ANTHROPIC:
        return AnthropicTransport(http, options.model, place.base)
    return HttpTransport(http, target, base=place.base, config=config, sends_binary=options.sends_binary)


class RemoteModel:
    """Everything happens on the event loop, between `start` and `stop`."""

    def __init__(self, name: str, options: RemoteOptions, config: ModelConfig, server: ServerCalls) -> None:
        self.name = name
        self.endpoints = EndpointSet(policy=options.policy)
        self._options = options
        self._config = config
        self._server = server
        self._calls = RemoteCalls(options, self.endpoints, self._transport)
        self._transports: dict[Endpoint, Transport] = {}
        self._source: Source = source_of(options)
        self._membership: Membership | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # Start and stop

    def start(self) -> None:
        """Follow the members and probe them."""
        self.endpoints.observers.append(self._changed)
        if isinstance(self._source, StaticSource):
            self.endpoints.update(self._source.listed)
        else:
            self._membership = Membership(self.endpoints, self._source)
            self._keep(self._membership.run())
        interval_s = self._options.health_interval_s
        if interval_s is None:
            interval_s = 5.0 if self._options.speaks_v2 else 0.0
        if interval_s:
            timeout_s = max(1.0, self._options.connect_timeout_s)
            prober = Prober(self.endpoints, self._probe, ProbeTimes(interval_s=interval_s, timeout_s=timeout_s))
            self._keep(prober.run())

    async def stop(self) -> None:
        """End everything; requests in flight fail."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for transport in self._transports.values():
            transport.lose("the model is unloaded")
        self._transports.clear()

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _transport(self, endpoint: Endpoint) -> Transport:
        transport = self._transports.get(endpoint)
        if transport is None:
            try:
                place = self._options.place(endpoint.address)
            except InvalidArgumentError as error:
                raise CallError(error.message, outcome=Outcome.CONNECT_FAILED, is_unprocessed=True) from None
            transport = self._transports[endpoint] = make_transport(place, self._options, self._config)
        return transport

    async def _probe(self, endpoint: Endpoint) -> EndpointState:
        return await self._transport(endpoint).probe(self._calls.headers())

    def _changed(self, endpoint: Endpoint) -> None:
        """Break the connections of an endpoint that is down; forget one that left, when nothing is in flight there."""
        now_ns = self.endpoints.clock.now_ns()
        level = logging.INFO if endpoint.is_available(now_ns) else logging.WARNING
        logger.log(level, "model '%s': %s", self.name, endpoint.news(now_ns))
        if endpoint.state is EndpointState.DOWN and endpoint in self._transports:
            self._transports[endpoint].lose(f"the endpoint is down: {endpoint.problem}")
        self._forget_idle()

    def _forget_idle(self) -> None:
        for endpoint in [each for each in self._transports if not each.is_member and not each.outstanding]:
            self._transports.pop(endpoint).lose("the endpoint has left")

    @property
    def is_ready(self) -> bool:
        """Whether an endpoint could take a request."""
        return any(each.state is EndpointState.READY for each in self.endpoints.endpoints)

    # Requests

    def begin(self, request: InferRequest, sender: ResponseSender) -> None:
        """Answer a request, which may take as long as it likes."""
        has_room = asyncio.Event()
        loop = asyncio.get_running_loop()
        task = self._keep(self._answer(request, sender, has_room))
        sender.watch(on_cancel=lambda: _call_soon(loop, task.cancel), on_room=lambda: _call_soon(loop, has_room.set))

    async def _answer(self, request: InferRequest, sender: ResponseSender, has_room: asyncio.Event) -> None:
        answer = _Answer(sender, has_room)
        error: ServerError
        try:
            await self._carry_out(request, answer)
        except asyncio.CancelledError:
            error = CancelledError("the client has left, or the model was unloaded")
        except ServerError as failure:
            error = failure
        except Exception as failure:
            logger.exception("model '%s' failed", self.name)
            error = InternalError(f"model '{self.name}' failed: {type(failure).__name__}: {failure}")
        else:
            return
        finally:
            if self._transports:
                self._forget_idle()
        with suppress(ServerError):  # the server has ended the request
            sender.finish(error)

    async def _carry_out(self, request: InferRequest, answer: _Answer) -> None:
        hops = request.parameters.get(HOPS, 0)
        hops = (int(hops) if str(hops).isdigit() else 0) + 1
        if hops > MAX_HOPS:
            raise InvalidArgumentError(
                f"model '{self.name}': the request has passed {MAX_HOPS} servers already ({HOPS}): do remote models "
                "send it in a circle?"
            )
        try:
            await self._infer(request, hops, answer)
        except ServerError as error:
            if not self._options.fallback or answer.has_begun or not _falls_back(error):
                raise
            await self._fall_back(request, hops, answer, error)

    async def _infer(self, request: InferRequest, hops: int, answer: _Answer) -> None:
        limit = self._options.max_pending
        if limit and self.endpoints.outstanding >= limit:
            raise QueueFullError(f"model '{self.name}': {limit} requests are in flight already (max_pending)")
        if self._membership is not None and not len(self.endpoints):
            with suppress(TimeoutError):
                async with asyncio.timeout(MEMBERSHIP_TIMEOUT_S):
                    await self._membership.is_known.wait()
            if not len(self.endpoints):
                raise UnavailableError(f"no endpoint is known: {self._membership.problem or 'the list is empty'}")
        if not self._config.is_decoupled:

            async def ask(transport: Transport, sent: Sent) -> InferResponse:
                return await transport.infer(request, sent)

            answer.finish(await self._calls.run(request, hops, ask, has_begun=lambda: False))
            return

        async def relay(transport: Transport, sent: Sent) -> None:
            async with aclosing(transport.stream(request, sent)) as responses:
                while True:
                    try:
                        async with asyncio.timeout(self._options.timeout_s or None):
                            response = await anext(responses)
                    except StopAsyncIteration:
                        return
                    await answer.send(response)

        await self._calls.run(request, hops, relay, has_begun=lambda: answer.has_begun)
        answer.finish(None)

    async def _fall_back(self, request: InferRequest, hops: int, answer: _Answer, error: ServerError) -> None:
        """Let the first of the other models answer that can. Raises `error` if none can."""
        for name in self._options.fallback:
            other = InFlightRequest(
                model_name=name,
                version=None,
                inputs=request.inputs,
                id=request.id,
                outputs=request.outputs,
                parameters={**request.parameters, HOPS: hops},
                priority=request.priority,
                timeout_us=request.timeout_us,
                deadline_ns=request.deadline_ns,
            )
            try:
                async for response in self._server.infer(other):
                    if response.error is not None:
                        raise response.error
                    if not response.is_empty:
                        response.parameters = {**(response.parameters or {}), SERVED_BY: name}
                        await answer.send(response)
            except ServerError as other_error:
                if answer.has_begun or not _falls_back(other_error):
                    raise
                error.message += f"; fallback '{name}': {other_error.message}"
                continue
            except asyncio.CancelledError:
                other.cancel()
                raise
            if self._config.is_decoupled:
                answer.finish(None)
            return
        raise error

    # Metrics

    def measure(self) -> Iterable[Measurement]:
        """By endpoint; the server adds the model."""
        for endpoint in self.endpoints.endpoints:
            labels = {"endpoint": endpoint.address}
            for outcome, count in endpoint.outcomes.items():
                yield Measurement(
                    "remote_requests",
                    "counter",
                    "Requests to an endpoint of a remote model, by how they ended: done, connect, lost, timeout, "
                    "server, client, overloaded, cancelled",
                    count,
                    {**labels, "outcome": outcome.value},
                )
            yield Measurement(
                "remote_retries",
                "counter",
                "Requests that failed at an endpoint and were tried again",
                endpoint.num_retries,
                labels,
            )
            yield Measurement(
                "remote_ejections",
                "counter",
                "How often an endpoint got no requests for a while because too many had failed",
                endpoint.num_ejections,
                labels,
            )
            yield Measurement(
                "remote_outstanding", "gauge", "Requests in flight to an endpoint", endpoint.outstanding, labels
            )
            yield Measurement(
                "remote_endpoint_up",
                "gauge",
                "1 while an endpoint is ready, 0 while it starts, drains or is down",
                float(endpoint.state is EndpointState.READY),
                labels,
            )
            yield Measurement(
                "remote_latency_seconds",
                "gauge",
                "Moving average of the time that an endpoint takes for a request",
                endpoint.latency_s,
                labels,
            )


class _Answer:
    """The way of responses to the client, no faster than it reads."""

    def __init__(self, sender: ResponseSender, has_room: asyncio.Event) -> None:
        self._sender = sender
        self._has_room = has_room
        self.has_begun = False

    async def send(self, response: InferResponse) -> None:
        while not self._sender.has_room:
            self._has_room.clear()
            if not self._sender.has_room:
                await self._has_room.wait()
        self.has_begun = True
        self._sender.send(response, wait=False)

    def finish(self, response: InferResponse | None) -> None:
        self.has_begun = True
        self._sender.finish(response)


def _falls_back(error: ServerError) -> bool:
    """Whether another model may do what this one cannot: not now, or not with so long a text."""
    is_too_long = error.code in (ErrorCode.INVALID_ARGUMENT, ErrorCode.PAYLOAD_TOO_LARGE) and (
        "context" in error.message or "too long" in error.message
    )
    return is_too_long or error.code in _FALLBACK_CODES


def _call_soon(loop: asyncio.AbstractEventLoop, function: Any) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(function)


def measurements(model: RemoteModel | None) -> Sequence[Measurement]:
    return list(model.measure()) if model is not None else ()


def source_of(options: RemoteOptions) -> Source:
    """Raises InvalidArgumentError for a source that is not written as one."""
    if options.endpoints:
        return StaticSource(options.endpoints)

    def open_lines(url: str) -> AsyncIterator[bytes]:
        parts = urlsplit(url)
        is_secure = parts.scheme == "https"
        address = Address(
            parts.hostname or "", parts.port or (443 if is_secure else 80), options.tls if is_secure else None
        )
        pool = HttpPool(address, connect_timeout_s=options.connect_timeout_s)
        key = options.secret.read()
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return http_lines(pool, parts.path + (f"?{parts.query}" if parts.query else "") or "/", headers)

    return parse_source(options.discover, open_lines=open_lines, scheme=options.scheme)
