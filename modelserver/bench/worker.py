"""A load process: obeys the bench on a socket pair, sends requests, and hands over what it recorded."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys

from modelserver.bench import messages
from modelserver.bench.llm.player import LlmPlayer
from modelserver.bench.player import Player, TensorPlayer
from modelserver.errors import ErrorCode, InternalError, ServerError


async def obey(control: socket.socket) -> None:
    """Perform the commands on `control` until it is closed."""
    reader, writer = await asyncio.open_connection(sock=control, limit=2**20)
    player: Player | None = None
    try:
        while (command := await messages.read_command(reader)) is not None:
            reply: messages.Reply
            try:
                if isinstance(command, messages.Setup):
                    player = TensorPlayer(command.work, command.share)
                    reply = messages.Done()
                elif isinstance(command, messages.SetupLlm):
                    player = LlmPlayer(command.work, command.share)
                    reply = messages.Done()
                elif player is None:
                    raise InternalError("a command came before the setup")
                else:
                    reply = await _do(player, command)
            except ServerError as error:
                reply = messages.Failed(error.message, error.code.value)
            except Exception as error:  # the top of this process: the bench reports it
                reply = messages.Failed(f"{type(error).__name__}: {error}", ErrorCode.INTERNAL.value)
            await messages.write_message(writer, reply)
    finally:
        if player is not None:
            await player.close()
        writer.close()


async def _do(player: Player, command: messages.Begin | messages.Collect | messages.End) -> messages.Reply:
    if isinstance(command, messages.Collect):
        return player.collect()
    if isinstance(command, messages.End):
        return messages.Ended(await player.end(command.timeout_s))
    await player.begin(command.load)
    return messages.Done()


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
