"""`python -m benchmarks.llm.llama_cpp --peer PACKAGE`: our engine beside llama.cpp on the same GGUF files.

Each engine runs in a process of its own, in turns, on random weights that llama.cpp has quantized. Figures are tokens
per second of the process's CPU time, which other work on the machine disturbs less than the clock, or with `--clock
wall` of real time: several threads take CPU time while they wait for each other. The median of several rounds. Memory
is what is resident after one stream. `benchmarks/llm/llama_cpp_library.py` says how to install the peer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.llm.llama_cpp_library import FILE_TYPES, LlamaCpp, PeerMissingError
from benchmarks.llm.workload import Workload

Run = Callable[[Sequence[list[int]], Sequence[int]], object]
_ENGINES = ("llama.cpp", "ours")
_FORMS = (*FILE_TYPES, "F32")
_VOCABULARY = 20_000
_DECODED = 64
CASES = ("decode of one stream", "prefill of 1,024", "8 streams", "32 streams")
_FIRST = "ms to the first token of 128"
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
_GOALS = (1.05, 1.1, 1.5, 2.0)


def measure_cases(run: Run, wanted: Sequence[str] = CASES, clock: str = "cpu") -> dict[str, float]:
    """Tokens per second by one of CLOCKS, of each case that is wanted, and the megabytes resident after the first."""
    now = CLOCKS[clock]

    def seconds(prompts: Sequence[list[int]], lengths: Sequence[int]) -> float:
        start = now()
        run(prompts, lengths)
        return now() - start

    def prompt(length: int, seed: int) -> list[int]:
        return Workload(num_requests=1, shortest=length, longest=length, batch=1).prompts(_VOCABULARY, seed)[0]

    run([prompt(20, 9)], [3])
    # The time of the prompt and the first token is taken off.
    first = [seconds([prompt(128, seed + 10)], [1]) for seed in (1, 2)]
    decode = [seconds([prompt(128, seed)], [1 + _DECODED]) for seed in (1, 2)]
    found = {CASES[0]: _DECODED / (statistics.mean(decode) - statistics.mean(first)), _FIRST: min(first) * 1e3}
    found["MB"] = _status("VmRSS")
    if CASES[1] in wanted:
        found[CASES[1]] = 1024 / min(seconds([prompt(1024, seed)], [1]) for seed in (3, 4))
    for case, number in ((CASES[2], 8), (CASES[3], 32)):
        if case not in wanted:
            continue
        workload = Workload(num_requests=number, shortest=16, longest=64, batch=number)
        lengths = workload.output_lens()
        found[case] = sum(lengths) / seconds(workload.prompts(_VOCABULARY), lengths)
    return found


def _status(name: str) -> float:
    """Megabytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) / 1e3


def _measure_theirs(package: Path, path: Path, num_threads: int, cases: Sequence[str], clock: str) -> dict[str, float]:
    return measure_cases(LlamaCpp(package).load(path, num_threads).run, cases, clock)


def measure_ours(
    path: Path,
    num_threads: int,
    cases: Sequence[str],
    *,
    clock: str = "cpu",
    dtype: str = "auto",
    quantization: str | None = None,
) -> dict[str, float]:
    """`dtype` and `quantization`: those of the engine's options."""
    import torch
    from modelserver_backends.llm.checkpoint import open_checkpoint
    from modelserver_backends.llm.engine import Engine
    from modelserver_backends.llm.options import EngineOptions
    from modelserver_backends.llm.runner import load_runner
    from modelserver_backends.llm.sampler import Sampler

    from benchmarks.llm.measure import run_engine

    torch.set_num_threads(num_threads)
    options = EngineOptions(
        device="cpu",
        max_model_len=2048,
        max_num_seqs=32,
        num_threads=num_threads,
        kv_cache_memory_bytes=1 << 30,
        dtype=dtype,
        quantization=quantization,
    )
    before = _status("VmRSS")
    runner = load_runner(open_checkpoint(path), options, Sampler)
    loaded = _status("VmHWM") - before
    engine = Engine(options=options, runner=runner, tokenizer=None)
    # Its time is none of a token's.
    for gathering in [each for each in threading.enumerate() if each.name == "huge-pages"]:
        gathering.join()
    try:
        found = measure_cases(lambda prompts, lengths: run_engine(engine, prompts, lengths), cases, clock)
    finally:
        runner.close()
    return {**found, "MB before loading": before, "MB that loading took at most": loaded}


def _in_process(engine: str, path: Path, arguments: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.llm.llama_cpp", "--peer", str(arguments.peer)]
    command += ["--threads", str(arguments.threads), "--clock", arguments.clock, "--cases", *arguments.cases]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    answer = subprocess.run(
        [*command, "--engine", engine, "--file", str(path)],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return {name: float(value) for name, value in json.loads(answer.stdout.splitlines()[-1]).items()}


def _files(directory: Path, shape: str, forms: Sequence[str], package: Path) -> dict[str, Path]:
    """Of each form, a file that is made unless it is there."""
    from benchmarks.llm.random_gguf import write_gguf
    from benchmarks.llm.shapes import SHAPES

    stem = shape.replace(" ", "-")
    source = directory / f"{stem}-F32.gguf"
    wanted = {form: directory / f"{stem}-{form}.gguf" for form in forms}
    if all(path.exists() for path in wanted.values()):
        return wanted
    if not source.exists():
        write_gguf(source, SHAPES[shape])
    peer = LlamaCpp(package)
    for form, path in wanted.items():
        if not path.exists():
            peer.quantize(source, path, form)
    return wanted


def _print_table(form: str, path: Path, rounds: dict[str, list[dict[str, float]]]) -> None:
    medians = {
        engine: {name: statistics.median(each[name] for each in found) for name in found[0]}
        for engine, found in rounds.items()
    }
    theirs, ours = (medians[engine] for engine in _ENGINES)
    for case, goal in zip(CASES, _GOALS, strict=True):
        if case not in ours:
            continue
        ratio = ours[case] / theirs[case]
        print(f"| {form}, {case} | {theirs[case]:.1f} | {ours[case]:.1f} | {ratio:.2f}x | {goal}x |")
    print(
        f"| {form}, {_FIRST} | {theirs[_FIRST]:.0f} | {ours[_FIRST]:.0f} | {ours[_FIRST] / theirs[_FIRST]:.2f}x | 1x |"
    )
    read = [one[CASES[0]] * path.stat().st_size / 1e9 for one in (theirs, ours)]
    print(f"| {form}, GB/s of the file in decode | {read[0]:.1f} | {read[1]:.1f} | {read[1] / read[0]:.2f}x | |")
    print(f"| {form}, MB resident | {theirs['MB']:.0f} | {ours['MB']:.0f} | {ours['MB'] / theirs['MB']:.2f}x | 1x |")
    size, before, peak = path.stat().st_size / 1e6, ours["MB before loading"], ours["MB that loading took at most"]
    print(
        f"\n{path.name}: {size:.0f} MB. Ours has {before:.0f} MB before it loads, of torch and Python; loading takes "
        f"at most {peak:.0f} more, {peak / size:.2f}x the file.\n",
        flush=True,
    )


def _stream_gb_per_s() -> float:
    """What one thread reads from memory: a sum over 256 MB in huge pages, for which numpy asks the system."""
    values = np.ones(1 << 25, np.int64)
    times = []
    for _ in range(5):
        start = time.process_time()
        values.sum()
        times.append(time.process_time() - start)
    return values.nbytes / min(times) / 1e9


def _compare(arguments: argparse.Namespace, directory: Path) -> None:
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")
    print(f"{processor} ({platform.machine()}), {arguments.threads} threads, torch {torch.__version__}")
    print(f"A sum over 256 MB reads {_stream_gb_per_s():.1f} GB/s on one thread. Load: {os.getloadavg()[0]:.1f}")
    print(f"llama.cpp: {LlamaCpp(arguments.peer).instructions}\n")
    for form, path in _files(directory, arguments.shape, arguments.forms, arguments.peer).items():
        rounds: dict[str, list[dict[str, float]]] = {engine: [] for engine in _ENGINES}
        for _ in range(arguments.rounds):
            for engine in _ENGINES:
                rounds[engine].append(_in_process(engine, path, arguments))
        print(f"| {arguments.shape} in {form} | llama.cpp | ours | ratio | goal |\n|---|--:|--:|--:|--:|")
        _print_table(form, path, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.llm.llama_cpp", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peer", type=Path, default=Path("package"), help="what npm pack gives, unpacked")
    parser.add_argument("--shape", default="135 M", help="of benchmarks/llm/shapes.py: 135 M, Qwen3-0.6B, Llama-3.2-1B")
    parser.add_argument("--forms", nargs="+", choices=_FORMS, default=["Q4_K_M", "Q8_0"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="cpu", help="tokens per CPU second, or per second")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="the first always runs")
    parser.add_argument("--directory", type=Path, help="where the files are kept for the next time")
    parser.add_argument("--engine", choices=_ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        if arguments.engine == "ours":
            found = measure_ours(arguments.file, arguments.threads, arguments.cases, clock=arguments.clock)
            print(json.dumps(found))
        elif arguments.engine is not None:
            found = _measure_theirs(arguments.peer, arguments.file, arguments.threads, arguments.cases, arguments.clock)
            print(json.dumps(found))
        elif arguments.directory is not None:
            arguments.directory.mkdir(parents=True, exist_ok=True)
            _compare(arguments, arguments.directory)
        else:
            with tempfile.TemporaryDirectory() as directory:
                _compare(arguments, Path(directory))
    except PeerMissingError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
