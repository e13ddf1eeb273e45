"""How much of the server one unit of work passes through: `python -m benchmarks.call_counts [CASE ...]`.

A server runs in this process with a profiler on each of its threads. Printed for each case are the calls of our
functions, and the files that they are in, of one more unit: the cost of a long run less that of a short one. "Around
the network" leaves out what computes a language model's logits. `--list` prints the functions. Nothing here depends on
a clock, so every machine prints the same. Comprehensions do not count, since Python 3.12 has no calls for them, and
neither does what is called less often than once in two units (a timer, a collection).
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import uvloop

from benchmarks import requests
from modelserver.app.server import Server
from modelserver.options.server_options import ServerOptions

ROOT = Path(__file__).resolve().parent.parent
OURS = (str(ROOT / "modelserver") + "/", str(ROOT / "backends") + "/")
MODELS = ROOT / "model_repository"

IDENTITY = """
backend: "identity"
max_batch_size: 32
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""

# What computes a network's logits.
NETWORK = ("backends/llm/models/", "backends/llm/attention/", "backends/llm/kernels", "backends/llm/compute_thread")

# A function: its file below the root, and its name.
Function = tuple[str, str]


class Profiler:
    """Counts calls of our functions while `is_on`, on every thread that was started after `install`."""

    def __init__(self) -> None:
        self.is_on = False
        self._codes: Counter[Any] = Counter()

    def install(self) -> None:
        threading.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and self.is_on:
            self._codes[frame.f_code] += 1

    def count(self, work: Callable[[], None]) -> Counter[Function]:
        """The calls of ours while `work` runs."""
        self._codes = Counter()
        self.is_on = True
        work()
        self.is_on = False
        found: Counter[Function] = Counter()
        for code, number in self._codes.items():
            if code.co_filename.startswith(OURS) and not code.co_name.startswith("<"):
                found[str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname] += number
        return found


@dataclass(frozen=True, slots=True)
class Case:
    """`run(connection, n)` does `n` units of work. The difference of `short` and `long` runs is what is counted."""

    title: str
    run: Callable[[http.client.HTTPConnection, int], None]
    short: int
    long: int


def chat(connection: http.client.HTTPConnection, num_tokens: int) -> None:
    """One streamed chat with this number of tokens."""
    body = {
        "model": "tiny_chat",
        "messages": [{"role": "user", "content": "What is a list?"}],
        "max_tokens": num_tokens,
        "stream": True,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = _ask(connection, "/v1/chat/completions", json.dumps(body).encode())
    assert answer.endswith(b"data: [DONE]\n\n"), answer


def infer(connection: http.client.HTTPConnection, count: int) -> None:
    """Binary infer requests, one after the other."""
    request = requests.http_binary("identity", "INPUT0", np.ones((1, 16), np.float32))
    for _ in range(count):
        _ask(connection, request.path, request.body, dict(request.headers))


def reload(connection: http.client.HTTPConnection, count: int) -> None:
    """Loads of a model of which nothing has changed."""
    for _ in range(count):
        _ask(connection, "/v2/repository/models/identity/load", b"{}")


CASES = {
    "token": Case("streamed chat token", chat, 16, 80),
    "infer": Case("warm binary HTTP infer", infer, 4, 36),
    "reload": Case("reload of nothing", reload, 1, 9),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.call_counts", description="Calls and files per unit of work."
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"which to count: {' '.join(CASES)} (all)")
    parser.add_argument("--list", action="store_true", help="also list the functions, with their calls per unit")
    options = parser.parse_args()
    unknown = [case for case in options.cases if case not in CASES]
    if unknown:
        parser.error(f"unknown case {unknown[0]!r}, expected one of {' '.join(CASES)}")
    print(f"{'per':<24} {'calls':>6} {'files':>6}   around the network")
    profiler = Profiler()
    with tempfile.TemporaryDirectory() as scratch, served(Path(scratch), profiler) as port:
        for case in [CASES[name] for name in options.cases or CASES]:
            functions = measure(profiler, case, port)
            around = {key: rate for key, rate in functions.items() if not key[0].startswith(NETWORK)}
            (calls, files), (own_calls, own_files) = totals(functions), totals(around)
            print(f"{case.title:<24} {calls:>6.0f} {files:>6}   {own_calls:>5.0f} {own_files:>5}")
            if options.list:
                print_functions(functions)


def measure(profiler: Profiler, case: Case, port: int) -> dict[Function, float]:
    """The calls of each function per unit of work."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        case.run(connection, case.long)  # what is found out once is known from here on
        before = profiler.count(lambda: case.run(connection, case.short))
        after = profiler.count(lambda: case.run(connection, case.long))
    finally:
        connection.close()
    units = case.long - case.short
    rates = {function: (number - before[function]) / units for function, number in after.items()}
    return {function: rate for function, rate in rates.items() if rate >= 0.5}


def totals(functions: dict[Function, float]) -> tuple[float, int]:
    """Calls and files."""
    return sum(functions.values()), len({file for file, _ in functions})


def print_functions(functions: dict[Function, float]) -> None:
    for (file, name), rate in sorted(functions.items()):
        print(f"    {rate:>6.1f}  {file}: {name}")


@contextmanager
def served(scratch: Path, profiler: Profiler) -> Iterator[int]:
    """The HTTP port of a server whose threads are profiled."""
    repository = scratch / "models"
    (repository / "identity" / "1").mkdir(parents=True)
    (repository / "identity" / "config.pbtxt").write_text(IDENTITY)
    (repository / "tiny_chat").symlink_to(MODELS / "tiny_chat")
    options = ServerOptions(
        model_repository=(str(repository),),
        model_control_mode="explicit",
        load_model=("identity", "tiny_chat"),
        http_address="127.0.0.1",
        grpc_address="127.0.0.1",
        metrics_address="127.0.0.1",
        http_port=0,
        grpc_port=0,
        metrics_port=0,
    )
    profiler.install()
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server")
    thread.start()
    server = asyncio.run_coroutine_threadsafe(_start(options), loop).result(120)
    try:
        yield server.http_port
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        threading.setprofile(None)


async def _start(options: ServerOptions) -> Server:
    server = Server(options)
    await server.start()
    return server


def _ask(
    connection: http.client.HTTPConnection, path: str, body: bytes, headers: dict[str, str] | None = None
) -> bytes:
    connection.request("POST", path, body, headers or {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200:
        raise SystemExit(f"POST {path}: {answer.status} {content[:300]!r}")
    return content


if __name__ == "__main__":
    sys.exit(main())
