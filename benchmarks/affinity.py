"""What it is worth that prompts which begin alike go to one replica: `python -m benchmarks.affinity`.

Four servers of `model_repository/tiny_chat`, whose KV caches hold eight of the prefixes each, behind a router.
Callers ask for short answers to prompts that begin with one of 24 texts, in a random order; each way of routing begins
with new servers. Tokens per second of the answers, and the CPU of the servers per answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil

from benchmarks.router import COMMAND, ROOT, process, wait_for

NUM_SERVERS, NUM_PREFIXES, NUM_FITTING = 4, 24, 8
FIRST_PORT = 9700
PREFIX_WORDS, NUM_TOKENS, BYTES_PER_TOKEN, MAX_TOKENS = 260, 16, 2048, 1024
WAYS = {
    "by prefix": ["--affinity=prefix"],
    "in turn": ["--affinity=none", "--balance=round_robin"],
    "less loaded": ["--affinity=none"],
}


def write_model(directory: Path) -> Path:
    """The example model with a small cache, and one thread."""
    source = ROOT / "model_repository" / "tiny_chat"
    target = directory / "tiny_chat"
    target.mkdir(parents=True)
    (target / "1").symlink_to(source / "1")
    text = (source / "config.pbtxt").read_text().replace("67108864", str(NUM_FITTING * MAX_TOKENS * BYTES_PER_TOKEN))
    (target / "config.pbtxt").write_text(text + 'parameters { key: "num_threads" value { string_value: "1" } }\n')
    return directory


def prompts(num_requests: int, seed: int) -> list[str]:
    """Each a prefix, and a question of its own."""
    words = (ROOT / "docs" / "llm.md").read_text().split()
    prefixes = [" ".join(words[150 * each : 150 * each + PREFIX_WORDS]) for each in range(NUM_PREFIXES)]
    choose = random.Random(seed)
    return [f"{choose.choice(prefixes)} Question {number}:" for number in range(num_requests)]


async def ask(port: int, texts: list[str], num_callers: int) -> tuple[float, int, int]:
    """Seconds for all, the tokens of the answers, and the tokens of the prompts."""
    waiting = iter(texts)
    counts = [0, 0]

    async def call(session: aiohttp.ClientSession) -> None:
        for text in waiting:
            body = {
                "model": "tiny_chat",
                "prompt": text,
                "max_tokens": NUM_TOKENS,
                "ignore_eos": True,
                "temperature": 0,
            }
            async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
                document = json.loads(await answer.read())
                assert answer.status == 200, document
                counts[0] += document["usage"]["completion_tokens"]
                counts[1] += document["usage"]["prompt_tokens"]

    async with aiohttp.ClientSession() as session:
        began = time.perf_counter()
        await asyncio.gather(*(call(session) for _ in range(num_callers)))
        return time.perf_counter() - began, *counts


def measure(repository: Path, flags: list[str], options: argparse.Namespace, seed: int) -> tuple[float, float, float]:
    """Tokens a second, CPU ms of the servers per answer, tokens of a prompt."""
    ready = "GET /v2/models/tiny_chat/ready HTTP/1.1\r\nhost: a\r\n\r\n"
    with contextlib.ExitStack() as stack:
        ports = [FIRST_PORT + 10 * each for each in range(NUM_SERVERS)]
        servers = [
            stack.enter_context(process(*COMMAND, "serve", f"--model-repository={repository}", *port_flags(port)))
            for port in ports
        ]
        for port in ports:
            wait_for(port, ready)
        to = ",".join(f"http://127.0.0.1:{port}" for port in ports)
        stack.enter_context(process(*COMMAND, "route", f"--to={to}", *flags, *port_flags(FIRST_PORT + 90)))
        wait_for(FIRST_PORT + 90, ready)
        asyncio.run(ask(FIRST_PORT + 90, prompts(2 * NUM_PREFIXES, seed + 1), options.callers))
        before = cpu_s(servers)
        seconds, written, read = asyncio.run(ask(FIRST_PORT + 90, prompts(options.requests, seed), options.callers))
        return written / seconds, 1000 * (cpu_s(servers) - before) / options.requests, read / options.requests


def port_flags(first: int) -> list[str]:
    return [f"--http-port={first}", f"--grpc-port={first + 1}", f"--metrics-port={first + 2}"]


def cpu_s(pids: list[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.affinity")
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--callers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        repository = write_model(Path(directory))
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in WAYS}
        for number in range(options.rounds):
            for name, flags in WAYS.items():
                found[name].append(measure(repository, flags, options, 10 * number))
    print(f"{'routing':<12} {'tokens/s':>9} {'CPU ms per answer':>18} {'tokens of a prompt':>19}")
    for name, figures in found.items():
        rate, cpu_ms, length = (statistics.median(column) for column in zip(*figures, strict=True))
        print(f"{name:<12} {rate:>9.0f} {cpu_ms:>18.1f} {length:>19.0f}")


if __name__ == "__main__":
    main()
