"""A load process: obeys the bench on a socket pair, sends requests, and hands over what it recorded."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys

from modelserver.bench.llm.player import LlmPlayer
from modelserver.bench.player import Player, TensorPlayer
from modelserver.bench.work import (
    Begin,
    Collect,
    Done,
    End,
    Ended,
    Failed,
    Reply,
    Setup,
    SetupLlm,
    read_command,
    write_message,
)
from modelserver.errors import ErrorCode, InternalError, ServerError


async def obey(control: socket.socket) -> None:
    """Perform the commands on `control` until it is closed."""
    reader, writer = await asyncio.open_connection(sock=control, limit=2**20)
    player: Player | None = None
    try:
        while (command := await read_command(reader)) is not None:
            reply: Reply
            try:
                if isinstance(command, Setup):
                    player = TensorPlayer(command.work, command.share)
                    reply = Done()
                elif isinstance(command, SetupLlm):
                    player = LlmPlayer(command.work, command.share)
                    reply = Done()
                elif player is None:
                    raise InternalError("a command came before the setup")
                else:
                    reply = await _do(player, command)
            except ServerError as error:
                reply = Failed(error.message, error.code.value)
            except Exception as error:  # the top of this process: the bench reports it
                reply = Failed(f"{type(error).__name__}: {error}", ErrorCode.INTERNAL.value)
            await write_message(writer, reply)
    finally:
        if player is not None:
            await player.close()
        writer.close()


async def _do(player: Player, command: Begin | Collect | End) -> Reply:
    if isinstance(command, Collect):
        return player.collect()
    if isinstance(command, End):
        return Ended(await player.end(command.timeout_s))
    await player.begin(command.load)
    return Done()


def main() -> None:
    """Run with the number of the control socket as the only argument."""
    control = socket.socket(fileno=int(sys.argv[1]))
    # Nothing here makes cycles per request; a collection would only be a pause in the measurement.
    gc.freeze()
    gc.disable()
    try:
        import uvloop
    except ImportError:
        asyncio.run(obey(control))
    else:
        uvloop.run(obey(control))


if __name__ == "__main__":
    main()
