"""What a scrape of many models costs: `python -m benchmarks.scrape [--models 100]`.

A server in this process loads models that echo. The figures are medians of CPU time: what a scrape takes of the event
loop's turn and what it takes in all, while the models are idle and when each has had a request since the last scrape;
and what a probe of readiness takes of the loop.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from modelserver.app.server import Server
from modelserver.core.long_work import finish
from modelserver.options.server_options import ServerOptions
from modelserver.telemetry.exposition import text_slices
from modelserver.telemetry.metrics import ServerMetrics
from modelserver.telemetry.statistics import ModelStatistics

CONFIG = """
backend: "identity"
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] } ]
dynamic_batching { }
"""
ROUNDS = 15
LOAD_PAGES = 200


def _write(root: Path, count: int) -> None:
    for number in range(count):
        directory = root / f"model_{number:04}" / "1"
        directory.mkdir(parents=True)
        (directory.parent / "config.pbtxt").write_text(CONFIG)


def _scrape(metrics: ServerMetrics) -> tuple[float, float, int]:
    """Milliseconds on the loop and in all, and the bytes of the page."""
    begin = time.thread_time()
    slices = metrics.collect_slices()
    next(slices)
    on_loop = time.thread_time() - begin
    page = finish(text_slices(finish(slices)))
    return on_loop * 1e3, (time.thread_time() - begin) * 1e3, sum(map(len, page))


def _measure(metrics: ServerMetrics, before: Callable[[], None]) -> tuple[float, float, int]:
    rows = []
    for _ in range(ROUNDS):
        before()
        rows.append(_scrape(metrics))
    on_loop, in_all, sizes = zip(*rows, strict=True)
    return statistics.median(on_loop), statistics.median(in_all), sizes[-1]


def _load_page(metrics: ServerMetrics) -> float:
    """Microseconds for a page of the load; language models are measured each tenth second at most."""
    times = []
    for _ in range(ROUNDS):
        begin = time.thread_time()
        for _ in range(LOAD_PAGES):
            metrics.load.text()
        times.append((time.thread_time() - begin) / LOAD_PAGES)
    return statistics.median(times) * 1e6


def _readiness(server: Server) -> float:
    """Milliseconds of the loop for one probe of /v2/health/ready, besides HTTP."""
    times = []
    for _ in range(ROUNDS):
        begin = time.thread_time()
        assert server.dataplane.is_ready
        times.append(time.thread_time() - begin)
    return statistics.median(times) * 1e3


async def main(count: int) -> None:
    """Print a line for each case."""
    with tempfile.TemporaryDirectory() as directory:
        _write(Path(directory), count)
        options = ServerOptions(model_repository=(directory,), http_port=0, grpc_port=0, metrics_port=0)
        server = Server(options)
        await server.start()
        try:
            metrics = server.metrics()
            each: list[ModelStatistics] = [model.statistics for model in server.repository.models()]

            def work() -> None:
                for numbers in each:
                    numbers.record_lone(1, 1000, 2000, 1000, 500, 5000)

            _scrape(metrics)
            print(f"{count} models, load page: {_load_page(metrics):.1f} us on the loop")
            print(f"{count} models, readiness: {_readiness(server):.3f} ms on the loop")
            for name, before in (("idle", lambda: None), ("all busy", work)):
                on_loop, in_all, size = _measure(metrics, before)
                print(
                    f"{count} models, {name}: {on_loop:.2f} ms on the loop, {in_all:.2f} ms in all, {size / 1e3:.0f} kB"
                )
        finally:
            await server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=100)
    asyncio.run(main(parser.parse_args().models))
