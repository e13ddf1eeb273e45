"""A request as an instance in a child process sees it."""

from __future__ import annotations

from modelserver.backend import InferRequest, ResponseSender, ResponseStream
from modelserver.execution.child_exchange import Exchange
from modelserver.execution.child_line import ChildLine
from modelserver.execution.messages import RequestRecord
from modelserver.execution.packing import unpack
from modelserver.execution.shared_buffer import ByteView

_NO_STREAM = ResponseStream()


class HostedRequest(InferRequest, kw_only=True, eq=False):
    """A request in a child process; whether it is cancelled is asked of the server, where the caller is known."""

    number: int
    exchange: Exchange
    own_line: ResponseSender | None = None

    @property  # type: ignore[misc]  # over the field of the same name
    def is_cancelled(self) -> bool:
        return self.exchange.is_cancelled(self.number)

    @is_cancelled.setter
    def is_cancelled(self, _value: bool) -> None:
        """The answer stays with the server."""

    @property
    def sender(self) -> ResponseSender:
        """How to answer later, or more than once: as on the server's side, but it may be taken at any time."""
        return self.own_line or self.take_sender()

    def take_sender(self) -> ResponseSender:
        """Make the sender, once."""
        self.exchange.keep_line(self.number)
        self.own_line = ResponseSender(ChildLine(self.exchange, self.number, is_decoupled=self.is_decoupled))
        return self.own_line


def hosted_request(exchange: Exchange, record: RequestRecord, payload: bytearray | ByteView) -> HostedRequest:
    """The request that was sent. Streams are the server's: all have the same one, which nobody uses."""
    return HostedRequest(
        record.model_name,
        record.version,
        {tensor.name: unpack(tensor, payload) for tensor in record.inputs},
        record.id,
        record.outputs,
        record.parameters,
        record.priority,
        record.timeout_us,
        record.deadline_ns,
        record.sequence_id,
        record.sequence_start,
        record.sequence_end,
        record.rows,
        _NO_STREAM,
        is_decoupled=record.is_decoupled,
        trace_parent=record.trace_parent,
        arrival_ns=record.arrival_ns,
        number=record.number,
        exchange=exchange,
    )
