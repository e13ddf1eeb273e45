"""A server of our own, for models that no server serves yet: started for a run, and gone after it."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from modelserver.client.server_client import ServerClient
from modelserver.errors import UnavailableError

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
_POLL_S = 0.05
_NUM_LINES = 20
# The lines of the ports in what `modelserver serve` prints when it is ready.
_ADDRESS = re.compile(rb"^(http|grpc) +(?:http://)?(\S+:\d+)\s*$", re.MULTILINE | re.IGNORECASE)
_PR_SET_PDEATHSIG = 1


@contextmanager
def private_server(repository: Path, model: str, flags: Sequence[str] = (), *, is_grpc: bool = False) -> Iterator[str]:
    """The URL of a server of `repository` with `model` loaded, or the address of its gRPC port. `flags` are further
    ones of `modelserver serve`.

    Raises UnavailableError with the last lines of its log when it does not start, or the model does not load.
    """
    words = [
        *("serve", f"--model-repository={repository}", "--model-control-mode=explicit", f"--load-model={model}"),
        *("--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--http-port=0", "--grpc-port=0", "--metrics-port=0"),
        *("--exit-on-error=false", *flags),
    ]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-m", "modelserver", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C is for us: the server goes when we have no more use for it.
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        try:
            addresses = _wait(process, log.fileno(), model)
            yield addresses["grpc"] if is_grpc else f"http://{addresses['http']}"
        finally:
            _stop(process)


def _die_with_parent() -> None:
    """Have the kernel end the server when this process is killed. In the child, before it becomes the server."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(process: subprocess.Popen[bytes], log: int, model: str) -> dict[str, str]:
    """The addresses of its ports by protocol, as soon as the model serves."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        text = os.pread(log, 1 << 20, 0)
        found = {protocol.decode().lower(): address.decode() for protocol, address in _ADDRESS.findall(text)}
        if len(found) == 2:
            _check_model(found["http"], model)
            return found
        if process.poll() is not None:
            raise UnavailableError(f"the server did not start:\n{_tail(text)}")
        time.sleep(_POLL_S)
    raise UnavailableError(
        f"the server did not start within {START_TIMEOUT_S:g} s:\n{_tail(os.pread(log, 1 << 20, 0))}"
    )


def _check_model(address: str, model: str) -> None:
    """Raise UnavailableError with the reason unless the model serves."""
    rows = [row for row in ServerClient(f"http://{address}").index() if row.get("name") == model]
    if not any(row.get("state") == "READY" for row in rows):
        reasons = "; ".join(str(row.get("reason", "")) for row in rows) or "it is not in the repository"
        raise UnavailableError(f"model '{model}' cannot be served: {reasons}")


def _tail(text: bytes) -> str:
    return "\n".join(text.decode(errors="replace").splitlines()[-_NUM_LINES:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
