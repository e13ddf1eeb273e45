"""The floor for gRPC in Python: a bare grpc.aio server that sends each message back as it came."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc

METHOD = "/inference.GRPCInferenceService/ModelInfer"


async def _echo(message: bytes, context: Any) -> bytes:
    return message


async def main(port: int) -> None:
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.aio.server(options=options)
    service, method = METHOD.strip("/").split("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(_echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    try:
        import uvloop

        uvloop.run(main(int(sys.argv[1])))
    except ImportError:
        asyncio.run(main(int(sys.argv[1])))
