"""The core as a front process sees it: frontends that answer, by asking it."""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, cast

from modelserver.app.logs import set_own_level
from modelserver.auth.api_keys import open_keys
from modelserver.execution.process.shared_buffer import SharedBuffer
from modelserver.frontends.grpc.keyed import grpc_frontend
from modelserver.frontends.http.access_log import with_access_log
from modelserver.frontends.http.cors import with_cors
from modelserver.frontends.http.keyed import http_frontend
from modelserver.protocol.limits import GrpcLimits, HttpLimits
from modelserver.wire.processes.forwarding import ForwardedCalls, GrpcForwarder, HttpForwarder
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
from modelserver.wire.processes.short_calls import ShortCalls, is_open

_logger = logging.getLogger(__name__)


class Core:
    """`http` and `grpc` are frontends for any number of ports. Made and used on the running event loop."""

    def __init__(
        self,
        descriptors: Sequence[int],
        http_limits: HttpLimits,
        grpc_limits: GrpcLimits,
        *,
        drain: Callable[[float], None],
        retire: Callable[[], None] = lambda: None,
    ) -> None:
        """`descriptors`: the link, the memory that this process writes, and that of the core.

        `drain` is called with the seconds of grace when the core wants this process to end, or is gone; `retire`
        before, when clients are to go elsewhere.
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
        self.dataplane = RemoteDataPlane(self.link, numbers)
        # Their handlers of other calls than inference never run here: the forwarders see to it.
        planes = cast(Any, self.dataplane)
        # What is forwarded, the core looks at.
        keys = open_keys(http_limits.access.keys_file)
        self._short = ShortCalls(self.link, numbers)
        http = HttpForwarder(http_frontend(planes, planes, http_limits, keys), self._calls)
        self.http = with_access_log(http, is_logged=http_limits.access.is_logged, keys=keys)
        if is_open(http_limits.access):
            self.http = self._short.http(self.http)
        self.http = with_cors(self.http, http_limits.cors)
        self.grpc = GrpcForwarder(
            grpc_frontend(planes, planes, grpc_limits, keys),
            self._calls,
            short=self._short if is_open(grpc_limits.access) else None,
            is_logged=grpc_limits.access.is_logged,
            keys=keys,
        )

    @property
    def num_inflight(self) -> int:
        """What the core has not answered."""
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
