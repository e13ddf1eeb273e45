"""Record what real clients send: their side of each connection, as it is replayed by tests of the wire.

    PYTHONPATH=tests:. python tests/wire/recordings/record.py [NAME ...]

Runs the server over the example models, and each client against it through a proxy that writes down what the client
sends, to `http1/<client>.hex` and `http2/<client>.hex`. Clients that are not installed are left out: curl,
nghttp and h2load (nghttp2-client), node. The server's own answers are not kept: they are what tests compare.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.serving import running_server

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
MODELS = HERE.parents[2] / "model_repository"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_LINE_BYTES = 48
_MAX_BYTES = 200_000


class RecordingProxy:
    """Passes connections on to `upstream`; `streams` is what each client said, in the order of the connections."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.streams: list[bytearray] = []
        self._upstream = upstream
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._start(self._accept)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        """Returns when all clients are gone."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)
        for each in self._sockets:
            each.close()

    def _start(self, function: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._upstream)
            said = bytearray()
            self.streams.append(said)
            self._sockets += [client, server]
            self._start(_pass_on, client, server, said)
            self._start(_pass_on, server, client, bytearray())


def _pass_on(source: socket.socket, target: socket.socket, said: bytearray) -> None:
    try:
        while data := source.recv(65536):
            said += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            with suppress(OSError):  # the other thread was first
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def recorded(upstream: tuple[str, int]) -> Iterator[RecordingProxy]:
    proxy = RecordingProxy(upstream)
    try:
        yield proxy
    finally:
        proxy.close()


def save(name: str, streams: list[bytearray]) -> None:
    """Write what a client said, a file for each of its connections."""
    for number, said in enumerate(said for said in streams if said):
        protocol = "http2" if said.startswith(_PREFACE) else "http1"
        assert len(said) <= _MAX_BYTES, f"{name} sent {len(said)} bytes, too many for a fixture"
        directory = HERE / protocol
        directory.mkdir(exist_ok=True)
        text = said.hex()
        lines = [text[at : at + 2 * _LINE_BYTES] for at in range(0, len(text), 2 * _LINE_BYTES)]
        path = directory / f"{name if number == 0 else f'{name}_{number + 1}'}.hex"
        path.write_text("\n".join(lines) + "\n")
        print(f"{protocol}/{path.name}: {len(said)} bytes")


def main(names: list[str]) -> None:
    from clients import CLIENTS

    with running_server(MODELS) as server:
        ports = {"http": ("127.0.0.1", server.server.http_port), "grpc": ("127.0.0.1", server.server.grpc_port)}
        for client in CLIENTS:
            if names and client.name not in names:
                continue
            if client.program and shutil.which(client.program) is None:
                print(f"{client.name}: {client.program} is not installed")
                continue
            with recorded(ports[client.port]) as proxy:
                try:
                    client.run(proxy.address)
                except subprocess.SubprocessError as error:
                    print(f"{client.name}: {error}")
                    continue
            save(client.name, proxy.streams)


if __name__ == "__main__":
    main(sys.argv[1:])
