"""What an ensemble costs on its own: `python -m benchmarks.ensemble_steps`.

Chains of one identity model, which is executed on the event loop, so that there is nothing but the steps; CPU time of
the process, the best of many rounds, because other processes disturb it least.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from pathlib import Path

import numpy as np

from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.tensor import Tensor
from modelserver.repository.options import ControlMode, RepositoryOptions
from modelserver.repository.repository import ModelRepository

NUM_ROUNDS = 15
NUM_REQUESTS = 1500
FEW, MANY = 2, 8

_MODEL = """
backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: 16 }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 16 }
"""


def ensemble_config(num_steps: int) -> str:
    """A chain: INPUT0 -> t1 -> t2 -> ... -> OUTPUT0."""
    tensors = ["INPUT0", *(f"t{number}" for number in range(1, num_steps)), "OUTPUT0"]
    steps = ",".join(
        f'{{ model_name: "model" input_map {{ key: "INPUT0" value: "{source}" }} '
        f'output_map {{ key: "OUTPUT0" value: "{target}" }} }}'
        for source, target in itertools.pairwise(tensors)
    )
    return f'{_MODEL.replace("backend", "# backend")} platform: "ensemble" ensemble_scheduling {{ step [ {steps} ] }}'


def write_models(root: Path) -> None:
    for name, config in {
        "model": _MODEL,
        **{f"chain{count}": ensemble_config(count) for count in (1, FEW, MANY)},
    }.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)


def request_us(repository: ModelRepository, name: str) -> float:
    """CPU time of one request in microseconds, the best round."""
    data = np.ones((1, 16), np.float32)
    rounds = []
    for _ in range(NUM_ROUNDS):
        start = time.process_time()
        for _ in range(NUM_REQUESTS):
            request = InFlightRequest(
                model_name=name, version=None, inputs={"INPUT0": Tensor("INPUT0", Datatype.FP32, data)}
            )
            repository.get(name, None).infer(request)
        rounds.append((time.process_time() - start) / NUM_REQUESTS)
    return min(rounds) * 1e6


async def measure(root: Path) -> None:
    repository = ModelRepository(RepositoryOptions(roots=(root,), control_mode=ControlMode.NONE))
    try:
        await repository.start()
        alone = request_us(repository, "model")
        one, few, many = (request_us(repository, f"chain{count}") for count in (1, FEW, MANY))
    finally:
        await repository.stop(5)
    step = (many - few) / (MANY - FEW)
    print(f"the model by itself      {alone:6.2f} us")
    print(f"ensemble of 1, {FEW}, {MANY} steps {one:6.2f} {few:6.2f} {many:6.2f} us")
    print(f"each step                {step:6.2f} us, beyond its model {step - alone:.2f}")
    print(f"each request             {one - step:6.2f} us")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        write_models(Path(directory))
        asyncio.run(measure(Path(directory)))


if __name__ == "__main__":
    main()
