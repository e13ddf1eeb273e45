"""`python -m benchmarks.llm.instances`: time to the first token of conversations that two engines share.

Compared are the server's choice of an engine by what it has computed, and engines that take requests as they come.

Three conversations of six turns begin at random times, each with 1,300 tokens of its own in front. Random weights.
Rounds of one kind follow one another; the two kinds take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import numpy as np

from benchmarks.llm.measure import percentile
from benchmarks.llm.placement import DIRECTORY
from benchmarks.llm.shapes import SHAPES, write_checkpoint
from modelserver.backend import BackendContext, InstanceGroupKind, ModelConfig, ModelInstanceGroup, Tensor
from modelserver.backend.discovery import find_backend
from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.execution import instance_pool
from modelserver.execution.model import Model

_CONFIG = {**SHAPES["tiny (2 M)"], "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6}
_BEGINNING, _TURN, _ANSWER = 1300, 30, 24
_PARAMETERS = b'{"temperature": 0, "max_tokens": %d, "ignore_eos": true}' % _ANSWER


@dataclass
class Times:
    """To first tokens, in ms."""

    first_turns: list[float] = field(default_factory=list)
    later_turns: list[float] = field(default_factory=list)


async def load(directory: Path, num_threads: int) -> Model:
    group = ModelInstanceGroup(kind=InstanceGroupKind.KIND_CPU, count=2)
    parameters = {"num_threads": str(num_threads), "instance_in_process": "false"}
    config = ModelConfig("m", backend="llm", instance_group=(group,), parameters=parameters)
    context = BackendContext("m", 1, config, directory, directory / "1")
    llm = find_backend("llm")
    context = replace(context, config=llm.complete_config(context))
    loop = asyncio.get_running_loop()
    return await asyncio.to_thread(lambda: Model.load(llm, context, loop=loop))


async def first_token_ms(model: Model, token_ids: list[int]) -> float:
    inputs = [
        Tensor("input_ids", Datatype.INT32, np.array(token_ids, np.int32)),
        Tensor("sampling_parameters", Datatype.BYTES, np.array([_PARAMETERS], object)),
        Tensor("stream", Datatype.BOOL, np.array([True])),
    ]
    request = InFlightRequest(
        model_name="m", version=None, inputs={tensor.name: tensor for tensor in inputs}, is_decoupled=True
    )
    began_s, first_s = time.perf_counter(), 0.0
    async for response in model.infer(request):
        if response.error is not None:
            raise response.error
        first_s = first_s or time.perf_counter() - began_s
    return first_s * 1e3


async def converse(model: Model, chance: random.Random, times: Times) -> None:
    token_ids = [chance.randrange(1, 2000) for _ in range(_BEGINNING)]
    await asyncio.sleep(0.3 * chance.random())
    for turn in range(6):
        (times.later_turns if turn else times.first_turns).append(await first_token_ms(model, token_ids))
        token_ids += [chance.randrange(1, 2000) for _ in range(_ANSWER + _TURN)]
        await asyncio.sleep(0.1 * chance.random())


async def measure(directory: Path, num_threads: int, num_rounds: int, seed: int) -> Times:
    model = await load(directory, num_threads)
    times, chance = Times(), random.Random(seed)
    for _ in range(num_rounds):
        await asyncio.gather(*(converse(model, chance, times) for _ in range(3)))
    model.stop()
    await asyncio.to_thread(model.close)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llm.instances", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--turns", type=int, default=2, help="how often both kinds are measured (default: 2)")
    parser.add_argument("--threads", type=int, default=1, help="of each engine (default: 1)")
    arguments = parser.parse_args()
    print("| engine of a request | first turns p50 | mean | p90 ms | later turns p50 | p90 ms |\n|---|" + "--:|" * 5)
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root) / "m"
        version = write_checkpoint(directory / "1", _CONFIG)
        for path in (DIRECTORY / "1").glob("tokenizer*"):
            shutil.copy(path, version)
        for turn in range(arguments.turns):
            for kind in ("as they come", "by what it has computed"):
                places = {} if kind.startswith("by") else {"return_value": None}
                with mock.patch.object(instance_pool, "Places", wraps=instance_pool.Places, **places):
                    times = asyncio.run(measure(directory, arguments.threads, arguments.rounds, turn))
                first, later = times.first_turns, times.later_turns
                figures = (
                    *(statistics.median(first), statistics.mean(first), percentile(first, 0.9)),
                    *(statistics.median(later), percentile(later, 0.9)),
                )
                print(f"| {kind} | " + " | ".join(f"{figure:.0f}" for figure in figures) + " |", flush=True)


if __name__ == "__main__":
    main()
