"""What a streamed token costs: `python -m benchmarks.streams [--streams 256] [--rate 20] [--seconds 5] [--process]`.

A server has a model that computes nothing and gives each request a token at every tick of a clock
(`benchmarks/backends/metronome`), so that only the server's own work is measured. That many clients, all in this
process, read streams. Printed is CPU per token, by the kernel's account of each thread: of the event loop, on which
frontends and sockets are, of the other threads (mostly the model's worker, which writes the responses), and of both.
With `--process` the model lives in a child process, whose CPU is counted with the other threads.
Then each route is called for one token, again and again, by one client: how long that takes, and what the call costs.
Routes are measured in turns. `all` are the routes of every API.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.servers.ours import modelserver
from benchmarks.servers.process import ServerProcess

BACKENDS = Path(__file__).parent / "backends"
CONFIG = """
backend: "metronome"
parameters {{ key: "tokens_per_s" value {{ string_value: "{rate}" }} }}
parameters {{ key: "instance_in_process" value {{ string_value: "{in_process}" }} }}
"""
WARMUP_S = 1.5


def chat(model: str, num_tokens: int) -> tuple[str, dict[str, object]]:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
    return "/v1/chat/completions", {**body, "max_tokens": num_tokens, "stream": True}


def completions(model: str, num_tokens: int) -> tuple[str, dict[str, object]]:
    return "/v1/completions", {"model": model, "prompt": "hello", "max_tokens": num_tokens, "stream": True}


def responses(model: str, num_tokens: int) -> tuple[str, dict[str, object]]:
    return "/v1/responses", {"model": model, "input": "hello", "max_output_tokens": num_tokens, "stream": True}


def generate(model: str, num_tokens: int) -> tuple[str, dict[str, object]]:
    parameters = json.dumps({"max_tokens": num_tokens})
    body = {"text_input": "hello", "stream": True, "sampling_parameters": parameters}
    return f"/v2/models/{model}/generate_stream", body


def llamacpp(model: str, num_tokens: int) -> tuple[str, dict[str, object]]:
    return "/completion", {"model": model, "prompt": "hello", "n_predict": num_tokens, "stream": True}


def messages(model: str, num_tokens: int) -> tuple[str, dict[str, object]]:
    return "/v1/messages", chat(model, num_tokens)[1]


def ollama(model: str, num_tokens: int) -> tuple[str, dict[str, object]]:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
    return "/api/chat", {**body, "options": {"num_predict": num_tokens}}


def tgi(model: str, num_tokens: int) -> tuple[str, dict[str, object]]:
    return "/generate_stream", {"model": model, "inputs": "hello", "parameters": {"max_new_tokens": num_tokens}}


ROUTES: dict[str, Callable[[str, int], tuple[str, dict[str, object]]]] = {
    "chat": chat,
    "completions": completions,
    "responses": responses,
    "messages": messages,
    "ollama": ollama,
    "tgi": tgi,
    "llamacpp": llamacpp,
    "generate": generate,
}
# As it stands in an event of any of them.
TOKEN = b'" token"'


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU seconds of the server's threads."""

    loop_s: float
    others_s: float

    def since(self, before: Spent) -> Spent:
        return Spent(self.loop_s - before.loop_s, self.others_s - before.others_s)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streams", description="CPU per streamed token.")
    parser.add_argument("routes", nargs="*", metavar="ROUTE", help=f"of {' '.join(ROUTES)}, or all (chat)")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens per second of each stream")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--process", action="store_true", help="the model in a process of its own")
    parser.add_argument("--rounds", type=int, default=3, help="the median of these is printed")
    options = parser.parse_args()
    routes = options.routes or ["chat"]
    if routes == ["all"]:
        routes = list(ROUTES)
    unknown = [route for route in routes if route not in ROUTES]
    if unknown:
        parser.error(f"unknown route {unknown[0]!r}, expected one of {' '.join(ROUTES)}")
    with tempfile.TemporaryDirectory() as scratch:
        for model, rate in (("metronome", options.rate), ("at_once", 1e6)):
            (Path(scratch) / model / "1").mkdir(parents=True)
            config = CONFIG.format(rate=rate, in_process=str(options.process).lower())
            (Path(scratch) / model / "config.pbtxt").write_text(config)
        with modelserver(Path(scratch), f"--backend-directory={BACKENDS}") as server:
            # In turns, so that all have the same share of what the machine does besides.
            rounds = [
                {route: (*measure(server, route, options), *first_tokens(server, route)) for route in routes}
                for _ in range(options.rounds)
            ]
    print(
        f"{'route':<12} {'tokens/s':>9} {'loop µs':>8} {'others µs':>9} {'all µs':>7} {'cores':>6}  first ms  call µs"
    )
    for route in routes:
        figures = [statistics.median(column) for column in zip(*(each[route] for each in rounds), strict=True)]
        loop_us, others_us, tokens_per_s, first_ms, call_us = figures
        cores = (loop_us + others_us) * tokens_per_s / 1e6
        print(
            f"{route:<12} {tokens_per_s:>9.0f} {loop_us:>8.1f} {others_us:>9.1f} {loop_us + others_us:>7.1f} "
            f"{cores:>6.2f} {first_ms:>9.2f} {call_us:>8.0f}"
        )


def measure(server: ServerProcess, route: str, options: argparse.Namespace) -> tuple[float, float, float]:
    """CPU µs per token of the loop and of all else, and tokens per second."""
    num_tokens = int(options.rate * (options.seconds + WARMUP_S + 10))
    path, body = ROUTES[route]("metronome", num_tokens)
    readers = Readers(server.ports["http"], path, json.dumps(body).encode(), options.streams)
    try:
        readers.read_for(WARMUP_S)
        before, count = spent(server.process.pid), readers.num_tokens
        start_s = time.monotonic()
        readers.read_for(options.seconds)
        used, took_s = spent(server.process.pid).since(before), time.monotonic() - start_s
        count = readers.num_tokens - count
    finally:
        readers.close()
    return used.loop_s / count * 1e6, used.others_s / count * 1e6, count / took_s


def first_tokens(server: ServerProcess, route: str, num_calls: int = 200) -> tuple[float, float]:
    """Calls of one token each, one after the other: ms to that token, and CPU µs of the server for the whole call."""
    path, body = ROUTES[route]("at_once", 1)
    request = request_of(path, json.dumps(body).encode())
    times_s = []
    with socket.create_connection(("127.0.0.1", server.ports["http"])) as connected:
        before = spent(server.process.pid)
        for _ in range(num_calls):
            start_s = time.perf_counter()
            connected.sendall(request)
            answer = first = b""
            while not answer.endswith(b"0\r\n\r\n"):
                answer += connected.recv(1 << 16)
                if not first and TOKEN in answer:
                    first = answer
                    times_s.append(time.perf_counter() - start_s)
            if not first:
                raise SystemExit(f"no token: {answer[:500]!r}")
        used = spent(server.process.pid).since(before)
    return statistics.median(times_s) * 1e3, (used.loop_s + used.others_s) / num_calls * 1e6


def request_of(path: str, body: bytes) -> bytes:
    fields = ("Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}")
    return "\r\n".join((f"POST {path} HTTP/1.1", *fields, "", "")).encode() + body


class Readers:
    """Clients of one stream each, read by one thread."""

    def __init__(self, port: int, path: str, body: bytes, count: int) -> None:
        self.num_tokens = 0
        self._poll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        request = request_of(path, body)
        for _ in range(count):
            connected = socket.create_connection(("127.0.0.1", port))
            connected.sendall(request)
            connected.setblocking(False)
            self._sockets[connected.fileno()] = connected
            self._poll.register(connected, select.EPOLLIN)

    def read_for(self, seconds: float) -> None:
        """Read what comes. Raises SystemExit when the server says anything but tokens."""
        ends_s = time.monotonic() + seconds
        while (left_s := ends_s - time.monotonic()) > 0:
            for number, _ in self._poll.poll(left_s):
                data = self._sockets[number].recv(1 << 16)
                if not data or b'"error":{' in data or b'"error":"' in data:
                    raise SystemExit(f"a stream failed: {data[:500]!r}")
                self.num_tokens += data.count(TOKEN)

    def close(self) -> None:
        self._poll.close()
        for each in self._sockets.values():
            each.close()


def spent(pid: int) -> Spent:
    """What the threads of a process and its children have used, in the kernel's account, which knows nanoseconds."""
    loop_ns = others_ns = 0
    tasks = Path("/proc") / str(pid) / "task"
    for task in tasks.iterdir():
        used_ns = int((task / "schedstat").read_text().split()[0])
        if int(task.name) == pid:
            loop_ns += used_ns
        else:
            others_ns += used_ns
    children = {int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()}
    own = [spent(child) for child in children]
    return Spent(loop_ns / 1e9, others_ns / 1e9 + sum(child.loop_s + child.others_s for child in own))


if __name__ == "__main__":
    main()
