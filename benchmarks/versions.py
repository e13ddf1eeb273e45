"""This version beside another one: `python -m benchmarks.versions PYTHON` compares what their servers take.

PYTHON is the interpreter of a virtual environment in which the other version is installed, for example a worktree of
an older commit. Both serve the same models under the same load in turns; the medians of server CPU per request count,
which other work on the machine disturbs least. The spread is that of the other version's own rounds: a ratio within it
says nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import models, requests
from benchmarks.load import Load, run_load
from benchmarks.servers.ours import modelserver
from benchmarks.servers.process import ServerProcess

_ROOT = Path(__file__).parent.parent
_SMALL = np.arange(16, dtype=np.float32).reshape(1, 16)
_MIB = np.zeros((1, 1 << 18), dtype=np.float32)
_IMAGE = np.random.default_rng(0).random((1, 8, 8), dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Case:
    """One load of a model of the repository that both versions serve."""

    name: str
    load: Load
    concurrency: int


def _cases() -> Iterator[Case]:
    for place, model in (("in the loop", "identity"), ("by a worker", "identity_worker")):
        for concurrency in (1, 32):
            grpc = requests.grpc_raw(model, "INPUT0", _SMALL)
            yield Case(f"i gRPC identity, {place}", grpc, concurrency)
            binary = requests.http_binary(model, "INPUT0", _SMALL)
            yield Case(f"j HTTP binary identity, {place}", binary, concurrency)
    for concurrency in (1, 32):
        yield Case("j HTTP JSON identity", requests.http_json("identity", "INPUT0", _SMALL), concurrency)
    yield Case("k HTTP 1 MiB", requests.http_binary("identity", "INPUT0", _MIB), 8)
    yield Case("k gRPC 1 MiB", requests.grpc_raw("identity", "INPUT0", _MIB), 8)
    yield Case("l HTTP binary digits MLP", requests.http_binary("mlp", "image", _IMAGE), 32)
    yield Case("l gRPC digits MLP", requests.grpc_raw("mlp", "image", _IMAGE), 32)
    yield Case("l HTTP JSON digits MLP", requests.http_json("mlp", "image", _IMAGE), 32)
    for concurrency in (1, 32):
        yield Case("chat, 32 tokens", _chat(is_streamed=False), concurrency)
        yield Case("chat, 32 tokens, streamed", _chat(is_streamed=True), concurrency)


def _chat(*, is_streamed: bool) -> Load:
    document = {
        "model": "tiny_chat",
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": 32,
        "temperature": 0,
        "ignore_eos": True,
        "stream": is_streamed,
    }
    return Load("http", "/v1/chat/completions", json.dumps(document).encode(), {"Content-Type": "application/json"})


def _repository(scratch: Path) -> Path:
    models.identity(scratch, batching=False)
    models.identity(scratch / "by_worker", inline=False)
    (scratch / "by_worker" / "identity").rename(scratch / "identity_worker")
    (scratch / "by_worker").rmdir()
    models.digits_mlp(scratch)
    shutil.copytree(_ROOT / "model_repository" / "tiny_chat", scratch / "tiny_chat")
    return scratch


def _cpu_us(server: ServerProcess, load: Load) -> float:
    """Server CPU of a request in microseconds. The whole run counts, so loads have no warm-up."""
    before_s = server.cpu_s()
    result = run_load(load, server.ports[load.protocol])
    return (server.cpu_s() - before_s) / result.count * 1e6


def _compare(case: Case, servers: list[ServerProcess], *, rounds: int, seconds: float) -> str:
    load = Load(case.load.protocol, case.load.path, case.load.body, case.load.headers, case.concurrency, seconds, 0.0)
    samples: list[list[float]] = [[], []]
    for index in range(rounds + 1):
        for server, taken in zip(servers, samples, strict=True):
            cpu_us = _cpu_us(server, load)
            if index:  # the first round warms both
                taken.append(cpu_us)
    then, now = (statistics.median(taken) for taken in samples)
    spread = (max(samples[0]) - min(samples[0])) / then
    return f"| {case.name} | {case.concurrency} | {then:.1f} | {now:.1f} | {now / then:.2f} | {spread:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description="This version beside another.")
    parser.add_argument("python", help="the interpreter of an environment in which the other version is installed")
    parser.add_argument("--rounds", type=int, default=5, help="times that each server is measured (5)")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of one measurement (1.5)")
    parser.add_argument("--only", default="", help="only the cases whose names contain this")
    options = parser.parse_args()
    print("| case | at once | other, us | this, us | this / other | spread |\n|---|--:|--:|--:|--:|--:|", flush=True)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        repository = _repository(Path(scratch))
        servers = [
            stack.enter_context(modelserver(repository, name="other", python=options.python)),
            stack.enter_context(modelserver(repository, name="this")),
        ]
        for case in _cases():
            if options.only in case.name:
                print(_compare(case, servers, rounds=options.rounds, seconds=options.seconds), flush=True)


if __name__ == "__main__":
    main()
