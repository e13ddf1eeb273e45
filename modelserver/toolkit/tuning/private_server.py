"""A server of our own, for models that no server serves yet: started for a run, and gone after it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from modelserver.client.server_client import ServerClient
from modelserver.client.server_process import ServerProcess
from modelserver.errors import UnavailableError

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
_POLL_S = 0.05
_NUM_LINES = 20


@contextmanager
def private_server(repository: Path, model: str, flags: Sequence[str] = (), *, is_grpc: bool = False) -> Iterator[str]:
    """The URL of a server of `repository` with `model` loaded, or the address of its gRPC port. `flags` are further
    ones of `modelserver serve`.

    Raises UnavailableError with the last lines of its log when it does not start, or the model does not load.
    """
    words = [
        *(f"--model-repository={repository}", "--model-control-mode=explicit", f"--load-model={model}"),
        *("--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--http-port=0", "--grpc-port=0", "--metrics-port=0"),
        *("--exit-on-error=false", *flags),
    ]
    server = ServerProcess(words, death_signal=signal.SIGTERM)
    try:
        addresses = _wait(server, model)
        yield addresses["grpc"] if is_grpc else f"http://{addresses['http']}"
    finally:
        server.stop(STOP_TIMEOUT_S)


def _wait(server: ServerProcess, model: str) -> dict[str, str]:
    """The addresses of its ports by protocol, as soon as the model serves."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if len(server.addresses) == 2:
            _check_model(server.addresses["http"], model)
            return server.addresses
        if server.poll() is not None:
            server.close()
            raise UnavailableError(f"the server did not start:\n{_tail(server)}")
        time.sleep(_POLL_S)
    raise UnavailableError(f"the server did not start within {START_TIMEOUT_S:g} s:\n{_tail(server)}")


def _check_model(address: str, model: str) -> None:
    """Raise UnavailableError with the reason unless the model serves."""
    rows = [row for row in ServerClient(f"http://{address}").index() if row.get("name") == model]
    if not any(row.get("state") == "READY" for row in rows):
        reasons = "; ".join(str(row.get("reason", "")) for row in rows) or "it is not in the repository"
        raise UnavailableError(f"model '{model}' cannot be served: {reasons}")


def _tail(server: ServerProcess) -> str:
    return "\n".join(server.tail(_NUM_LINES))
