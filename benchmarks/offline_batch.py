"""What `modelserver batch` keeps of a server's throughput: `python -m benchmarks.offline_batch [--seconds 5]`.

A server in a process of its own has a model whose batches take a fixed time, as one on a GPU does, and one that
computes on the CPU. The bench finds the best closed loop, over requests of one row and of 32, 2 to 128 in flight;
`modelserver batch` with its own choices answers a file of rows for as long. Both in turns; the figures are rows per
second, of the batch from its first row to its last part.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import modelserver
from modelserver import Tensor

# Rows of a request, and requests in flight.
LEVELS = ((1, 32), (1, 64), (1, 128), (32, 2), (32, 4), (32, 8))
ROUNDS = 2
WIDTH = 64


def fixed(x: Any) -> Any:
    """5 ms for up to 32 rows."""
    time.sleep(0.005)
    return {"y": x}


def computed(x: Any) -> Any:
    """About 10 us of CPU for a row."""
    weights = np.ones((WIDTH, WIDTH), "f4")
    for _ in range(8):
        x = np.tanh(x @ weights)
    return {"y": x}


def _serve(ready: Path) -> None:
    server = modelserver.Server(http_port=0, http_address="127.0.0.1", allow_grpc=False, allow_metrics=False)
    row = Tensor["FP32", WIDTH]
    for function in (fixed, computed):
        server.add(function.__name__, function, max_batch_size=32, inputs={"x": row}, outputs={"y": row})
    with server:
        ready.write_text(server.http_url)
        sys.stdin.read()


def _closed_loop(url: str, model: str, seconds: float) -> float:
    """Rows per second of the best level."""
    words = ["-m", model, "-u", url, "--shape", f"x:{WIDTH}", "--json", "-", "--max-threads", "1"]
    words += ["--measurement-interval", str(int(seconds * 300)), "--max-trials", "3"]
    best = 0.0
    for num_rows, level in LEVELS:
        command = [sys.executable, "-m", "modelserver.cli.main", "bench", *words, "--concurrency-range", str(level)]
        command += ["-b", str(num_rows)]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        best = max(best, json.loads(ran.stdout)["levels"][0]["throughput"])
    return best


def _write_rows(path: Path, count: int) -> None:
    values = [round(number / WIDTH, 4) for number in range(WIDTH)]
    path.write_text("".join(json.dumps({"id": number, "x": values}) + "\n" for number in range(count)))


def _batch(url: str, model: str, rows: Path, out: Path, *more: str) -> float:
    words = ["batch", str(rows), f"--output={out}", f"--model={model}", f"--url={url}", "--drop=x", "--json", *more]
    command = [sys.executable, "-m", "modelserver.cli.main", *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(ran.stdout)
    assert result["state"] == "completed", result
    return float(result["answered"] / result["seconds"])


def main(seconds: float) -> None:
    """Print a line for each model."""
    with tempfile.TemporaryDirectory() as directory:
        top = Path(directory)
        ready = top / "url"
        server = subprocess.Popen([sys.executable, "-m", "benchmarks.offline_batch", "--serve", str(ready)], stdin=-1)
        try:
            while not ready.exists() or not ready.read_text():
                time.sleep(0.05)
            url = ready.read_text()
            for model in ("fixed", "computed"):
                loops, batches = [], []
                for turn in range(ROUNDS):
                    loops.append(_closed_loop(url, model, seconds))
                    _write_rows(top / "in.jsonl", int(loops[0] * seconds))
                    batches.append(_batch(url, model, top / "in.jsonl", top / f"{model}{turn}"))
                loop, batch = statistics.median(loops), statistics.median(batches)
                print(f"{model}: closed loop {loop:.0f} rows/s, batch {batch:.0f} rows/s, {batch / loop:.1%}")
        finally:
            server.communicate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--serve", type=Path)
    given = parser.parse_args()
    if given.serve:
        _serve(given.serve)
    else:
        main(given.seconds)
