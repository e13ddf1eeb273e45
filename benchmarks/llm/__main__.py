"""`python -m benchmarks.llm`: one table of what the LLM engine does, beside transformers on the same checkpoints.

On a machine with a GPU: `python -m benchmarks.llm --gpu`, see `gpu.py`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.engine import Engine
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.runner import load_runner
from modelserver_backends.llm.sampler import Sampler

from benchmarks.llm.measure import host_step_s, percentile, prefix_ttft_s, run_engine, run_transformers
from benchmarks.llm.shapes import SHAPES, write_checkpoint
from benchmarks.llm.workload import Workload

_TINY = "tiny (2 M)"
WORKLOADS = {
    _TINY: Workload(num_requests=128, shortest=12, longest=128, batch=32),
    "100 M": Workload(num_requests=64, shortest=10, longest=100, batch=32),
}
_STREAMS = "streams"
_NUM_STREAMS = 200
_NUM_THREADS = torch.get_num_threads()


@contextmanager
def opened(directory: Path, dtype: str, batch: int, num_threads: int | None = None) -> Iterator[Engine]:
    options = EngineOptions(device="cpu", dtype=dtype, max_model_len=2048, max_num_seqs=batch, num_threads=num_threads)
    runner = load_runner(open_checkpoint(directory), options, Sampler)
    try:
        yield Engine(options=options, runner=runner, tokenizer=None)
    finally:
        runner.close()


def measure(name: str, directory: Path, dtype: str, num_threads: int, *, has_peer: bool, rounds: int) -> None:
    """A row of the table. Both have as many threads; of several rounds, taken in turns, the best of each counts."""
    workload, vocab_size = WORKLOADS[name], SHAPES[name]["vocab_size"]
    prompts, lengths = workload.prompts(vocab_size), workload.output_lens()
    theirs = 0.0
    with opened(directory, dtype, workload.batch, num_threads) as engine:
        run_engine(engine, workload.prompts(vocab_size, seed=2)[:8], [4] * 8)
        measured = run_engine(engine, prompts, lengths)
        for index in range(rounds):
            if index:
                engine.reset()  # forgets the prompts that it has cached
                measured = max(measured, run_engine(engine, prompts, lengths), key=lambda one: one.tokens_per_s)
            if has_peer:
                torch.set_num_threads(num_threads)
                theirs = max(theirs, run_transformers(directory, workload, vocab_size, getattr(torch, dtype)))
        host = host_step_s(engine, workload.batch, vocab_size)
        cold, warm = prefix_ttft_s(engine, vocab_size)
    cells = [
        f"{name} {dtype}",
        f"{num_threads}",
        f"{measured.tokens_per_s:.0f}",
        *((f"{theirs:.0f}", f"{measured.tokens_per_s / theirs:.1f}x") if has_peer else ("", "")),
        *(f"{percentile(measured.ttft_s, share) * 1e3:.0f}" for share in (0.5, 0.99)),
        *(f"{percentile(measured.itl_s, share) * 1e3:.1f}" for share in (0.5, 0.99)),
        f"{measured.kv_use:.0%}",
        f"{cold * 1e3:.0f} / {warm * 1e3:.1f} = {cold / warm:.1f}x",
        f"{host * 1e3:.2f}",
    ]
    print("| " + " | ".join(cells) + " |", flush=True)


def measure_streams(name: str, directory: Path) -> None:
    """Many streams at once, more than run: all must come to their end."""
    workload = Workload(num_requests=_NUM_STREAMS, shortest=16, longest=64, batch=64)
    with opened(directory, "float32", workload.batch) as engine:
        measured = run_engine(engine, workload.prompts(SHAPES[name]["vocab_size"]), workload.output_lens())
    print(
        f"\n{_NUM_STREAMS} streams of {name} at once, {workload.batch} running: {measured.num_lost} lost, "
        f"{measured.tokens_per_s:.0f} tokens/s in {measured.num_steps} steps"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llm", description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="measure on a GPU, in the shapes of real models")
    parser.add_argument("--report", type=Path, help="where --gpu writes its report")
    parser.add_argument("--only", choices=[*WORKLOADS, _STREAMS], help="one part instead of all")
    parser.add_argument("--no-peer", action="store_true", help="without transformers")
    parser.add_argument("--rounds", type=int, default=1, help="runs of which the best counts; on a machine with others")
    arguments = parser.parse_args()
    if arguments.gpu:
        from benchmarks.llm.gpu import main as measure_gpu

        measure_gpu(arguments.report)
        return
    print(f"torch {torch.__version__}, {_NUM_THREADS} threads")
    if arguments.only != _STREAMS:
        print("| model | threads | tokens/s | transformers | ratio | TTFT p50 ms | p99 | ITL p50 ms | p99 | KV use "
              "| TTFT of 1,000 tokens, new / seen | host ms per step |")  # fmt: skip
        print("|" + "---|" * 12)
    with tempfile.TemporaryDirectory() as place:
        for name in WORKLOADS:
            directory = write_checkpoint(Path(place) / name.split()[0], SHAPES[name])
            is_tiny = name == _TINY
            if arguments.only in (None, name):
                # The backend takes one thread for a checkpoint as small as the first; all of them are the harder peer.
                for num_threads in sorted({1, _NUM_THREADS} if is_tiny else {_NUM_THREADS}):
                    has_peer = not arguments.no_peer
                    measure(name, directory, "float32", num_threads, has_peer=has_peer, rounds=arguments.rounds)
                if not is_tiny:
                    measure(name, directory, "bfloat16", _NUM_THREADS, has_peer=False, rounds=arguments.rounds)
            if is_tiny and arguments.only in (None, _STREAMS):
                torch.set_num_threads(_NUM_THREADS)
                measure_streams(name, directory)


if __name__ == "__main__":
    main()
