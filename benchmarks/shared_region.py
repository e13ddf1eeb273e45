"""A tensor in system shared memory that a server has been told of."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory

from benchmarks.requests import Array
from benchmarks.servers.process import ServerProcess


@contextlib.contextmanager
def shared_region(server: ServerProcess, region: str, data: Array) -> Iterator[None]:
    """`data` as the shared memory `region` of the server, which must allow that (`--allow-client-shm`)."""
    memory = SharedMemory(create=True, size=data.nbytes)
    try:
        assert memory.buf is not None, "it is open"
        memory.buf[: data.nbytes] = data.tobytes()
        _ask(server, region, "register", {"key": f"/{memory.name}", "offset": 0, "byte_size": data.nbytes})
        yield
        _ask(server, region, "unregister", {})
    finally:
        memory.close()
        memory.unlink()


def _ask(server: ServerProcess, region: str, verb: str, body: dict[str, object]) -> None:
    url = f"http://127.0.0.1:{server.ports['http']}/v2/systemsharedmemory/region/{region}/{verb}"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), method="POST")):
        pass
