"""`python -m benchmarks.llm.prefixes`: time to the first token of a prompt with a long prefix, in an engine that has
just started: computed, and read from the file of `kept_prefixes`.

Random weights in the shape of a known model. Each time is that of a new engine, from the request to its first token; of
the file the pages are in the system's cache after the first round, as they are after a restart.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.engine import Engine, GenerationRequest
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.runner import load_runner
from modelserver_backends.llm.sampler import Sampler
from modelserver_backends.llm.sampling_params import SamplingParams

from benchmarks.llm.shapes import SHAPES, write_checkpoint

_QUESTION_LEN = 20


def first_token_s(base: Path, prefix: list[int], options: dict[str, Any]) -> tuple[float, float]:
    """Seconds to load an engine, its prefixes included; and to the first token of a prompt."""
    began = time.perf_counter()
    chosen = EngineOptions(device="cpu", max_num_seqs=1, max_model_len=len(prefix) + 64, **options)
    with open_checkpoint(base) as checkpoint:
        engine = Engine(options=chosen, runner=load_runner(checkpoint, chosen, Sampler), tokenizer=None)
        if chosen.kept_prefixes:
            engine.open_prefixes(checkpoint.digest)
    load_s = time.perf_counter() - began
    try:
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        began = time.perf_counter()
        engine.compute(GenerationRequest([*prefix, *range(50, 50 + _QUESTION_LEN)], params))
        return load_s, time.perf_counter() - began
    finally:
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llm.prefixes", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="135 M")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(f"{arguments.shape}, {arguments.quantization or 'as stored'}; seconds, median of {arguments.rounds}")
    print("| tokens of the prefix | first token, computed | from the file | ratio | file | load without | with |")
    print("|" + "---|" * 7)
    with tempfile.TemporaryDirectory() as root:
        base = write_checkpoint(Path(root) / "base", SHAPES[arguments.shape])
        usual = {"quantization": arguments.quantization, "num_threads": arguments.threads}
        for count in arguments.tokens:
            prefix = [11 + token % 997 for token in range(count)]
            place = Path(root) / f"prefixes-{count}"
            kept = {**usual, "kept_prefixes": {"system": prefix}, "kept_prefix_directory": str(place)}
            first_token_s(base, prefix, kept)  # writes the file
            rounds = [
                (first_token_s(base, prefix, usual), first_token_s(base, prefix, kept)) for _ in range(arguments.rounds)
            ]
            plain_load, computed, kept_load, read = (
                statistics.median(each[kind][number] for each in rounds) for kind in (0, 1) for number in (0, 1)
            )
            num_bytes = sum(path.stat().st_size for path in place.iterdir())
            cells = [count, f"{computed:.3f}", f"{read:.3f}", f"{computed / read:.0f}x", f"{num_bytes / 1e6:.0f} MB"]
            print("| " + " | ".join(map(str, [*cells, f"{plain_load:.2f}", f"{kept_load:.2f}"])) + " |", flush=True)


if __name__ == "__main__":
    main()
