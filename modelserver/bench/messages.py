"""Messages between the bench and its load processes: msgpack records, each after its length."""

from __future__ import annotations

import asyncio

import msgspec

from modelserver.bench.llm.work import LlmWork
from modelserver.bench.work import ClosedLoad, OpenLoad, PeriodicLoad, Share, Work

_LENGTH_BYTES = 4


class Setup(msgspec.Struct, tag=True, frozen=True):
    """First of all. Answered by `Done`."""

    work: Work
    share: Share


class SetupLlm(msgspec.Struct, tag=True, frozen=True):
    """First of all, for an LLM. Answered by `Done`."""

    work: LlmWork
    share: Share


class BeginClosed(msgspec.Struct, tag=True, frozen=True):
    """Open the lanes and send. Answered by `Done` as soon as all have sent."""

    load: ClosedLoad


class BeginOpen(msgspec.Struct, tag=True, frozen=True):
    load: OpenLoad


class BeginPeriodic(msgspec.Struct, tag=True, frozen=True):
    load: PeriodicLoad


class Collect(msgspec.Struct, tag=True, frozen=True):
    """Answered by `Collected`."""


class End(msgspec.Struct, tag=True, frozen=True):
    """Stop sending. Answered by `Ended` when all answers have arrived, or the wait for them has timed out."""

    timeout_s: float


class Collected(msgspec.Struct, tag=True, frozen=True):
    """Records since the last ones: arrays of 64-bit integers as bytes. `cpu_s` is of the process, since its start."""

    cpu_s: float
    is_over: bool
    times: bytes = b""
    num_responses: bytes = b""
    response_times: bytes = b""
    failure_times: bytes = b""
    failures: dict[str, int] = {}
    # Of language models: see `llm.records`.
    calls: bytes = b""


class Done(msgspec.Struct, tag=True, frozen=True):
    pass


class Ended(msgspec.Struct, tag=True, frozen=True):
    num_unanswered: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The command could not be done; `code` is an `ErrorCode`."""

    message: str
    code: str


Begin = BeginClosed | BeginOpen | BeginPeriodic
Command = Setup | SetupLlm | BeginClosed | BeginOpen | BeginPeriodic | Collect | End
Reply = Collected | Done | Ended | Failed

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_replies = msgspec.msgpack.Decoder(Reply)


async def write_message(writer: asyncio.StreamWriter, message: Command | Reply) -> None:
    raw = _encoder.encode(message)
    writer.write(len(raw).to_bytes(_LENGTH_BYTES, "big") + raw)
    await writer.drain()


async def read_command(reader: asyncio.StreamReader) -> Command | None:
    """None when the other side has gone."""
    raw = await _read(reader)
    return None if raw is None else _commands.decode(raw)


async def read_reply(reader: asyncio.StreamReader) -> Reply | None:
    """None when the other side has gone."""
    raw = await _read(reader)
    return None if raw is None else _replies.decode(raw)


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
