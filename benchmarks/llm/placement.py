"""`python -m benchmarks.llm.placement`: what it costs that an engine lives in a process of its own.

The same streams of `model_repository/tiny_chat` from its loaded model, without frontends: the engine in a thread of the
server, and in a child process (`instance_in_process`). One thread of torch; rounds are taken in turns, the best counts.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from modelserver.backend import BackendContext, ModelConfig, Tensor
from modelserver.backend.discovery import find_backend
from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.execution.model import Model

DIRECTORY = Path(__file__).resolve().parents[2] / "model_repository" / "tiny_chat"
PARAMETERS = b'{"temperature": 0, "max_tokens": %d, "ignore_eos": true}'


async def load(place: str) -> Model:
    config = ModelConfig("tiny_chat", backend="llm", parameters={"instance_in_process": place, "num_threads": "1"})
    context = BackendContext("tiny_chat", 1, config, DIRECTORY, DIRECTORY / "1")
    llm = find_backend("llm")
    context = replace(context, config=llm.complete_config(context))
    loop = asyncio.get_running_loop()
    return await asyncio.to_thread(lambda: Model.load(llm, context, loop=loop))


def request(number: int, num_tokens: int) -> InFlightRequest:
    def text(name: str, value: bytes) -> Tensor:
        return Tensor(name, Datatype.BYTES, np.array([value], object))

    inputs = [
        text("text_input", b"number %d of the requests is this" % number),
        text("sampling_parameters", PARAMETERS % num_tokens),
        Tensor("stream", Datatype.BOOL, np.array([True])),
    ]
    return InFlightRequest(
        model_name="tiny_chat", version=None, inputs={tensor.name: tensor for tensor in inputs}, is_decoupled=True
    )


async def read(model: Model, number: int, num_tokens: int) -> tuple[float, int]:
    """Seconds to the first response, and how many there were."""
    begin = time.perf_counter()
    first, count = 0.0, 0
    async for response in model.infer(request(number, num_tokens)):
        if response.error is not None:
            raise response.error
        first = first or time.perf_counter() - begin
        count += 1
    return first, count


async def measure(model: Model, num_streams: int, num_tokens: int) -> tuple[float, float]:
    """Tokens per second, and the median time to the first in ms."""
    begin = time.perf_counter()
    results = await asyncio.gather(*(read(model, number, num_tokens) for number in range(num_streams)))
    wall = time.perf_counter() - begin
    return num_streams * num_tokens / wall, sorted(first for first, _ in results)[num_streams // 2] * 1e3


async def compare(rounds: int) -> None:
    models = {place: await load(word) for place, word in (("thread", "false"), ("process", "true"))}
    print("| streams at once | engine in | tokens/s | TTFT p50 ms |\n|--:|---|--:|--:|")
    for num_streams, num_tokens in ((1, 200), (8, 200), (32, 100), (128, 60)):
        best: dict[str, tuple[float, float]] = {}
        for _ in range(rounds):
            for place, model in models.items():
                best[place] = max(best.get(place, (0.0, 0.0)), await measure(model, num_streams, num_tokens))
        for place, (tokens_per_s, ttft_ms) in best.items():
            print(f"| {num_streams} | {place} | {tokens_per_s:.0f} | {ttft_ms:.1f} |", flush=True)
    for model in models.values():
        model.stop()
        await asyncio.to_thread(model.close)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(compare(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
