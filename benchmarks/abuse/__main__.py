"""Well-behaved clients beside each abuse of a server: `python -m benchmarks.abuse`.

Clients with a key send small requests over HTTP and gRPC, bodies of 2 MiB, and ask for the server's health, each at a
steady rate; a latency counts from when its request was due, so that a stop of the server is seen by all that it delays.
First they are alone, then beside each attack of attacks.py in turn. The last one, "a busy processor", sends nothing:
on few processors it tells how much of a ratio is the machine's. The table has one row per attack: the 99th
percentiles, their ratio to those without an attack, the requests that failed, and the server's resident memory at its
peak. The last line is the server's memory before the attacks, at the peak, and 5, 30 and 60 seconds after the attacks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil

from benchmarks.abuse.attacks import ATTACKS, MIB, NUMBERS
from benchmarks.overload.__main__ import quantile
from benchmarks.servers.ours import modelserver
from benchmarks.servers.process import ServerProcess
from modelserver.auth.api_keys import SCOPES, Scope, create_key
from modelserver.auth.caller_limits import NO_LIMITS
from modelserver.pb import grpc_service_pb2 as pb

ROOT = Path(__file__).parent.parent.parent
CONFIG = """
backend: "{backend}"
max_batch_size: 8
input [ {{ name: "INPUT0", data_type: TYPE_{datatype}, dims: [ -1 ] }} ]
output [ {{ name: "OUTPUT0", data_type: TYPE_{datatype}, dims: [ -1 ] }} ]
"""
PYTHON_MODEL = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        {statement}
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", r.inputs()[0].as_numpy())]) for r in requests
        ]
"""
RATES = {"HTTP": 100.0, "gRPC": 100.0, "2 MiB": 5.0, "health": 20.0}
ALONE = "alone"
ALONE_AGAIN = "alone again"
# When memory is looked at after the attacks, in seconds after their end.
AFTER_S = (5, 30, 60)
# The server closes a connection that has long been idle; it is not used again.
MAX_IDLE_S = 10.0


@dataclass(slots=True)
class Seen:
    """What the well-behaved clients saw during one attack."""

    latencies_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in RATES})
    failures: Counter[str] = field(default_factory=Counter)
    attacker: str = ""
    # The most while the clients ran.
    memory_mib: int = 0

    def p99_ms(self, name: str) -> float:
        return 1000 * quantile(self.latencies_s[name], 0.99)

    def worst_ms(self) -> float:
        return 1000 * max(value for values in self.latencies_s.values() for value in values)

    def figures(self) -> dict[str, object]:
        """What `--json` says of it."""
        return {
            "requests": {name: len(values) for name, values in self.latencies_s.items()},
            "p99_ms": {name: round(self.p99_ms(name), 3) for name in self.latencies_s},
            "worst_ms": round(self.worst_ms(), 3),
            "failures": dict(self.failures),
            "memory_mib": self.memory_mib,
            "attacker": self.attacker,
        }


class Idle:
    """A kept connection, and when it was last used."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._since_s = time.perf_counter()

    def is_usable(self) -> bool:
        return not self.reader.at_eof() and time.perf_counter() - self._since_s < MAX_IDLE_S


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.abuse", description=__doc__)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"one of: {'; '.join(ATTACKS)} (all)")
    parser.add_argument("--seconds", type=float, default=35.0, help="length of each attack (35: ten minutes in all)")
    parser.add_argument("--server-flag", action="append", default=[], help="one more flag for the server")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file too")
    options = parser.parse_args()
    if unknown := [name for name in options.attacks if name not in ATTACKS]:
        parser.error(f"unknown attack {unknown[0]!r}, expected one of {'; '.join(ATTACKS)}")
    with tempfile.TemporaryDirectory() as directory:
        keys = _prepare(Path(directory))
        flags = (
            f"--api-keys-file={directory}/keys.yaml",
            "--model-control-mode=explicit",
            "--load-model=numbers",
            "--load-model=texts",
            "--load-model=tiny_chat",
            "--allow-client-shm=true",
            *options.server_flag,
        )
        with modelserver(Path(directory) / "models", *flags) as server:
            attacks = options.attacks or list(ATTACKS)
            seen, memory = asyncio.run(_measure(server, keys, attacks, options.seconds, Path(directory)))
    if options.json is not None:
        rows = {name: each.figures() for name, each in seen.items()}
        options.json.write_text(json.dumps({"rows": rows, "memory_mib": memory}, indent=2) + "\n")


def _prepare(directory: Path) -> dict[str, str]:
    """The repository and the file of keys; what the owners of the keys send, by name."""
    for name, datatype, backend, statement in (
        ("numbers", "FP32", "identity", None),
        ("texts", "STRING", "identity", None),
        ("counted", "FP32", "identity", None),
        ("hangs", "FP32", "python", "time.sleep(3600)"),
        ("prints", "FP32", "python", "print('x' * 99, *['\\\\n'.join(['x' * 99] * 100)] * 2000)"),
    ):
        version = directory / "models" / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(CONFIG.format(datatype=datatype, backend=backend))
        if statement is not None:
            (version / "model.py").write_text(PYTHON_MODEL.format(statement=statement))
    shutil.copytree(ROOT / "model_repository" / "tiny_chat", directory / "models" / "tiny_chat")
    keys, lines = {}, []
    for name, scopes, models in (
        ("good", (Scope.INFER,), ("numbers",)),
        ("infer", (Scope.INFER,), ()),
        ("other", (Scope.INFER,), ("tiny_chat",)),
        ("admin", tuple(SCOPES), ()),
    ):
        keys[name], entry = create_key(name, frozenset(scopes), models, NO_LIMITS)
        lines.append(entry.line)
    (directory / "keys.yaml").write_text("".join(lines))
    return keys


async def _measure(
    server: ServerProcess, keys: dict[str, str], attacks: list[str], seconds: float, directory: Path
) -> tuple[dict[str, Seen], dict[str, int]]:
    """By attack, in order, between `ALONE` and `ALONE_AGAIN`; and the server's memory by moment, in MiB."""
    target = directory / "target.json"
    target.write_text(json.dumps({"http": server.ports["http"], "grpc": server.ports["grpc"], "keys": keys}))
    clients = Clients(server, keys["good"])
    await clients.run(min(seconds, 5.0))  # warm
    alone = await clients.run(seconds)
    _print_head(alone)
    _print(ALONE, alone, alone)
    rows = {ALONE: alone}
    memory = {"before": _memory_mib(server)}
    for name in attacks:
        command = [sys.executable, "-m", "benchmarks.abuse.attacks", name, str(target), str(seconds)]
        attacker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
        await asyncio.sleep(2.0)  # bodies are made
        seen = await clients.run(seconds - 2.0)
        try:
            printed, _ = await asyncio.wait_for(attacker.communicate(), 90)
            seen.attacker = printed.decode().strip()
        except TimeoutError:
            attacker.kill()
            seen.attacker = "still waiting for an answer"
        _print(name, seen, alone)
        rows[name] = seen
    memory["peak"] = max(seen.memory_mib for seen in rows.values())
    end_s = time.perf_counter()
    for after_s in AFTER_S:
        await asyncio.sleep(max(0.0, end_s + after_s - time.perf_counter()))
        memory[f"{after_s} s after"] = _memory_mib(server)
        if ALONE_AGAIN not in rows:
            rows[ALONE_AGAIN] = await clients.run(min(seconds, 10.0))
            _print(ALONE_AGAIN, rows[ALONE_AGAIN], alone)
    await clients.close()
    print("memory: " + ", ".join(f"{moment} {mib} MiB" for moment, mib in memory.items()))
    return rows, memory


def _memory_mib(server: ServerProcess) -> int:
    """The server's resident memory."""
    return int(psutil.Process(server.process.pid).memory_info().rss) // MIB


async def _watch_memory(server: ServerProcess, seen: Seen) -> None:
    while True:
        seen.memory_mib = max(seen.memory_mib, _memory_mib(server))
        await asyncio.sleep(0.1)


def _print_head(alone: Seen) -> None:
    print(
        "| beside | "
        + " | ".join(f"{name} p99" for name in RATES)
        + " | worst of all | failed | memory | attacker saw |"
    )
    print("|---|" + "---|" * (len(RATES) + 4), flush=True)


def _print(name: str, seen: Seen, alone: Seen) -> None:
    cells = [f"{seen.p99_ms(each):.1f} ms ({seen.p99_ms(each) / alone.p99_ms(each):.1f}x)" for each in RATES]
    failed = dict(seen.failures) or 0
    worst = f"{seen.worst_ms():.0f} ms"
    print(
        f"| {name} | {' | '.join(cells)} | {worst} | {failed} | {seen.memory_mib} MiB | {seen.attacker} |",
        flush=True,
    )


class Clients:
    """The well-behaved ones. Their connections are kept."""

    def __init__(self, server: ServerProcess, key: str) -> None:
        self._server = server
        self._http = server.ports["http"]
        self._key = key
        self._idle: list[Idle] = []
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.ports['grpc']}")
        self._call: Any = self._channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, 2])
        data = np.array([[1, 2]], np.float32).tobytes()
        request = pb.ModelInferRequest(model_name="numbers", inputs=[tensor], raw_input_contents=[data])
        self._message = request.SerializeToString()
        self._small = self._request(2)
        self._large = self._request(2 * MIB // 4)
        # Not `ready`, which rightly fails while a model of an attack does.
        self._health = b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n"

    def _request(self, num_numbers: int) -> bytes:
        parameters = {"binary_data_size": 4 * num_numbers}
        tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, num_numbers], "parameters": parameters}
        document = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
        head, data = json.dumps(document).encode(), bytes(4 * num_numbers)
        return (
            (
                f"POST {NUMBERS} HTTP/1.1\r\nHost: a\r\nx-api-key: {self._key}\r\n"
                f"Inference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(head) + len(data)}\r\n\r\n"
            ).encode()
            + head
            + data
        )

    async def run(self, seconds: float) -> Seen:
        """All of them for a while."""
        seen = Seen()
        sends: dict[str, Callable[[], Awaitable[str]]] = {
            "HTTP": lambda: self._ask(self._small),
            "gRPC": self._infer,
            "2 MiB": lambda: self._ask(self._large),
            "health": lambda: self._ask(self._health),
        }
        watching = asyncio.create_task(_watch_memory(self._server, seen))
        await asyncio.gather(*(self._offer(name, sends[name], seconds, seen) for name in RATES))
        watching.cancel()
        return seen

    async def _offer(self, name: str, send: Callable[[], Awaitable[str]], seconds: float, seen: Seen) -> None:
        tasks = set()
        start_s = time.perf_counter()

        async def one(due_s: float) -> None:
            status = await send()
            seen.latencies_s[name].append(time.perf_counter() - due_s)
            if status not in ("200", "OK"):
                seen.failures[f"{name}: {status}"] += 1

        for number in range(int(seconds * RATES[name])):
            due_s = start_s + number / RATES[name]
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            task = asyncio.create_task(one(due_s))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if tasks:
            await asyncio.wait(tasks)

    async def _infer(self) -> str:
        try:
            await self._call(self._message, metadata=(("x-api-key", self._key),), timeout=30)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        return "OK"

    async def _ask(self, request: bytes) -> str:
        try:
            async with asyncio.timeout(30):
                reader, writer = await self._connection()
                writer.write(request)
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError) as error:
            return type(error).__name__
        self._idle.append(Idle(reader, writer))
        return head[9:12].decode()

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The most recently used connection that the server has not closed, or a new one."""
        while self._idle:
            idle = self._idle.pop()
            if idle.is_usable():
                return idle.reader, idle.writer
            idle.writer.close()
        return await asyncio.open_connection("127.0.0.1", self._http)

    async def close(self) -> None:
        for idle in self._idle:
            idle.writer.close()
        await self._channel.close()


if __name__ == "__main__":
    main()
