"""The floor for HTTP: a raw ASGI application under uvicorn that sends the request's body back."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn


async def app(scope: Any, receive: Any, send: Any) -> None:
    chunks = []
    while True:
        message = await receive()
        chunks.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    body = b"".join(chunks)
    headers = [(b"content-type", b"application/octet-stream"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error", access_log=False, lifespan="off")
