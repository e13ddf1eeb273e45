"""`python -m benchmarks.llm.loading`: the time and the memory that it takes to load a model of 0.6 B random weights.

Each is loaded in a process of its own: a checkpoint in bfloat16 as it is, rounded to 8 bits, and GGUF files that are
given. `peak` and `held` count from before the load, beside what the weights take as they are multiplied.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.llm.shapes import SHAPES, write_checkpoint

_MB = 1e6


def _status(name: str) -> int:
    """Of this process, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, f"the kernel tells no {name}"
    return int(found[1]) * 1024


def load(place: Path, quantization: str | None) -> None:
    """Print what a load takes, as JSON."""
    begin = time.perf_counter()
    from modelserver_backends.llm.checkpoint import open_checkpoint
    from modelserver_backends.llm.models.linear import can_pack
    from modelserver_backends.llm.models.load import load_network
    from modelserver_backends.llm.options import EngineOptions
    from modelserver_backends.llm.text.tokenizer import Tokenizer
    from torch import float32

    from modelserver.backend import give_back

    logging.getLogger("modelserver_backends").setLevel(logging.ERROR)
    can_pack(float32)
    imported, before = time.perf_counter() - begin, _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    begin = time.perf_counter()
    with open_checkpoint(place) as checkpoint:
        loaded = load_network(checkpoint, EngineOptions(device="cpu", quantization=quantization, max_model_len=2048))
        seconds, peak = time.perf_counter() - begin, _status("VmHWM")
        begin = time.perf_counter()
        if place.is_file():
            Tokenizer.from_checkpoint(checkpoint)
    tokenizer = time.perf_counter() - begin
    gc.collect()
    give_back(0)
    print(
        json.dumps(
            {
                "import_s": imported,
                "load_s": seconds,
                "tokenizer_s": tokenizer,
                "before_mb": before / _MB,
                "weights_mb": sum(each.num_bytes for each in loaded.layers) / _MB,
                "peak_mb": (peak - before) / _MB,
                "held_mb": (_status("VmRSS") - before) / _MB,
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="*", help="GGUF files")
    parser.add_argument("--shape", default="Qwen3-0.6B", choices=SHAPES)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load is not None:
        load(options.files[0], options.load or None)
        return
    print("                                import s  load s  tokenizer s  before MB  weights MB  peak       held MB")
    with tempfile.TemporaryDirectory() as name:
        cases = [(file, "") for file in options.files]
        directory = write_checkpoint(Path(name), SHAPES[options.shape])
        cases += [(directory, ""), (directory, "int8"), (directory, "int4")]
        for place, quantization in cases:
            command = [sys.executable, "-m", "benchmarks.llm.loading", str(place), "--load", quantization]
            found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            what = place.name if place.is_file() else f"{options.shape} {quantization or 'bfloat16'}"
            print(
                f"{what:31} {found['import_s']:8.2f}{found['load_s']:8.2f}{found['tokenizer_s']:13.2f}"
                f"{found['before_mb']:11.0f}{found['weights_mb']:12.0f}"
                f"{found['peak_mb']:6.0f} ({found['peak_mb'] / found['weights_mb']:.2f}){found['held_mb']:9.0f}"
            )


if __name__ == "__main__":
    main()
