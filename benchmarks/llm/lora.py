"""`python -m benchmarks.llm.lora`: steps of a batch with adapters beside those of the base without any.

Medians of the CPU time of decode steps, in turns: of an engine without adapters; of one with eight adapters of rank 16
on all layers, and requests for the base only; and of that with requests spread over all adapters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.engine import Engine, GenerationRequest
from modelserver_backends.llm.lora.registry import Adapters
from modelserver_backends.llm.lora.uses import AdapterUse
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.runner import load_runner
from modelserver_backends.llm.sampler import Sampler
from modelserver_backends.llm.sampling_params import SamplingParams
from safetensors.torch import save_file

from benchmarks.llm.shapes import SHAPES, write_checkpoint

_NUM_ADAPTERS, _RANK = 8, 16
_PROMPT_LEN, _NUM_TOKENS = 16, 12


def write_adapter(base: Path, place: Path, seed: int) -> Path:
    """Random matrices for all linear layers of a Llama-shaped checkpoint, in bfloat16."""
    place.mkdir()
    (place / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": _RANK, "lora_alpha": 2 * _RANK}))
    torch.manual_seed(seed)
    tensors = {}
    with open_checkpoint(base) as checkpoint:
        for name in checkpoint.names():
            if name.endswith("_proj.weight"):
                outputs, inputs = checkpoint.shape(name)
                module = f"base_model.model.model.{name.removesuffix('.weight')}"
                tensors[f"{module}.lora_A.weight"] = torch.randn(_RANK, inputs).mul_(0.02).bfloat16()
                tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, _RANK).mul_(0.02).bfloat16()
    save_file(tensors, place / "adapter_model.safetensors")
    return place


def opened(base: Path, options: EngineOptions) -> Engine:
    with open_checkpoint(base) as checkpoint:
        runner = load_runner(checkpoint, options, Sampler)
    return Engine(options=options, runner=runner, tokenizer=None, adapters=Adapters.of(runner.target, options))


def step_times(engine: Engine, batch: int, names: list[str]) -> list[float]:
    """CPU seconds of the decode steps of a batch, whose rows name these adapters in turn."""
    for row in range(batch):
        engine.add(
            GenerationRequest(
                prompt_token_ids=[11 + row] * _PROMPT_LEN,
                params=SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True),
                adapters=(AdapterUse(names[row % len(names)]),) if names else (),
            )
        )
    times = []
    while engine.has_work:
        before = time.process_time()
        engine.step()
        times.append(time.process_time() - before)
    return times[2:-1]


def measure(base: Path, places: dict[str, Path], quantization: str | None, arguments: argparse.Namespace) -> None:
    common = {"device": "cpu", "max_model_len": 512, "max_num_seqs": 64, "quantization": quantization}
    common["num_threads"] = arguments.threads
    modules = tuple((name, str(place)) for name, place in places.items())
    with ExitStack() as opened_engines:
        plain = opened(base, EngineOptions(**common))  # type: ignore[arg-type]
        opened_engines.callback(plain.close)
        adapted = opened(base, EngineOptions(**common, lora_modules=modules, max_loras=len(modules)))  # type: ignore[arg-type]
        opened_engines.callback(adapted.close)
        for batch in arguments.batches:
            kinds = {"plain": (plain, []), "base only": (adapted, []), "adapters": (adapted, list(places))}
            times: dict[str, list[float]] = {kind: [] for kind in kinds}
            for round_number in range(arguments.rounds + 1):
                for kind, (engine, names) in kinds.items():
                    found = step_times(engine, batch, names)
                    times[kind] += found if round_number else []
            medians = {kind: statistics.median(each) for kind, each in times.items()}
            ratios = [medians["plain"] / medians[kind] for kind in ("base only", "adapters")]
            cells = [quantization or "as stored", batch, *(f"{each * 1e3:.2f}" for each in medians.values())]
            print("| " + " | ".join(map(str, [*cells, *(f"{ratio:.2f}x" for ratio in ratios)])) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llm.lora", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="100 M")
    parser.add_argument("--quantization", nargs="*", default=[], help="besides weights as they are stored")
    parser.add_argument("--batches", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--threads", type=int, help="of the engines; without it as many as torch takes")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{arguments.shape}, {_NUM_ADAPTERS} adapters of rank {_RANK}; CPU ms of a decode step")
    print("| weights | rows | without adapters | base only | all adapters | base only | all adapters |")
    print("|" + "---|" * 7)
    with tempfile.TemporaryDirectory() as root:
        base = write_checkpoint(Path(root) / "base", SHAPES[arguments.shape])
        places = {f"a{seed}": write_adapter(base, Path(root) / f"a{seed}", seed) for seed in range(_NUM_ADAPTERS)}
        for quantization in (None, *arguments.quantization):
            measure(base, places, quantization, arguments)


if __name__ == "__main__":
    main()
