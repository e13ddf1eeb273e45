"""`python -m benchmarks.llm.speculation`: one stream with and without guessed tokens, side by side in CPU time.

The network is of random weights, but writes a text that is known: its head gives each token one that follows. So texts
can be as much like their prompts as wanted, and every layer computes as in any network of its size. Each row is the
median of several rounds in turns; the texts of both ways must be equal. `json` is tiny_chat's, with a schema.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.engine import Engine, GenerationRequest
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.runner import load_runner
from modelserver_backends.llm.sampler import Sampler
from modelserver_backends.llm.sampling_params import SamplingParams
from modelserver_backends.llm.speculation.config import read_speculative_config
from safetensors.torch import load_file, save_file

from benchmarks.llm.shapes import _llama, write_checkpoint

_VOCAB = 8192
_SHAPE = _llama(384, 1024, 6, (6, 2, 64), _VOCAB)
_NUM_TOKENS = 128
_TINY_CHAT = Path(__file__).parents[2] / "model_repository" / "tiny_chat" / "1"
_CONFIGS: dict[str, Mapping[str, Any]] = {"ngram": {"method": "ngram"}, "suffix": {"method": "suffix"}}
_PERSON = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "maximum": 99},
        "registration_status": {"enum": ["registered", "unregistered"]},
        "is_administrator": {"type": "boolean"},
    },
    "required": ["identifier", "registration_status", "is_administrator"],
    "additionalProperties": False,
}
_SCHEMA = {"type": "array", "items": _PERSON, "minItems": 4, "maxItems": 4}


def write_known_text(directory: Path) -> list[int]:
    """A checkpoint whose greedy text goes through all tokens in one order, which is returned."""
    write_checkpoint(directory, _SHAPE)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    order = list(range(10, _VOCAB))
    random.Random(0).shuffle(order)
    embeddings = tensors["model.embed_tokens.weight"]
    head = torch.zeros_like(embeddings)
    head[order[1:]] = embeddings[order[:-1]] * (20.0 / embeddings.norm(dim=1)[order[:-1], None])
    tensors["lm_head.weight"] = head
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 1e-3
    save_file(tensors, path, metadata={"format": "pt"})
    return order


def prompts_of(order: list[int]) -> dict[str, tuple[list[int], float]]:
    """Prompts, and the temperature of their answers."""
    draw = random.Random(1)
    text = order[: _NUM_TOKENS + 1]
    edited = [draw.randrange(10, _VOCAB) if draw.random() < 1 / 16 else token for token in text]
    # All pairs of the answer, each followed by something else: every guess is wrong.
    misleading = [each for pair in pairwise(text) for each in (*pair, draw.randrange(10, _VOCAB))]
    unlike = [draw.randrange(10, _VOCAB) for _ in range(_NUM_TOKENS)]
    return {
        "answer repeats the prompt": ([*text, text[0]], 0.0),
        "answer edits every 16th token of the prompt": ([*edited, text[0]], 0.0),
        "answer is new": ([*unlike, text[0]], 0.0),
        "answer is drawn at random": (unlike, 50.0),
        "prompt misleads at every token": ([*misleading, text[0]], 0.0),
    }


def opened(directory: Path, config: Mapping[str, Any] | None, *, has_text: bool = False) -> Engine:
    options = EngineOptions(
        device="cpu",
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=4,
        enable_prefix_caching=False,
        speculative_config=read_speculative_config("speculative_config", config),
    )
    with open_checkpoint(directory) as checkpoint:
        if has_text or (config is not None and "model" in config):
            return Engine.from_checkpoint(checkpoint, options)
        return Engine(options=options, runner=load_runner(checkpoint, options, Sampler()), tokenizer=None)


def answer(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[list[int], float, int]:
    """Tokens of one stream, CPU seconds from the first of them, and steps."""
    request = GenerationRequest(prompt_token_ids=prompt, params=params)
    engine.add(request)
    tokens: list[int] = []
    began, num_steps = 0.0, 0
    while engine.has_work:
        for output in engine.step():
            began = began or time.process_time()
            tokens += output.token_ids
        num_steps += 1
    return tokens, time.process_time() - began, num_steps


def compare(name: str, method: str, engines: Mapping[bool, Engine], ask: Callable[[Engine], Any], rounds: int) -> None:
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds + 1):
        found = {}
        for is_guessing, engine in engines.items():
            tokens, taken, num_steps = ask(engine)
            found[is_guessing] = tokens, num_steps
            if number:
                seconds[is_guessing].append(taken)
        assert found[False][0] == found[True][0], f"{name}: {method} has changed the text"
    plain, guessing = (statistics.median(seconds[is_guessing]) for is_guessing in (False, True))
    tokens, steps = found[True]
    cells = [
        name,
        method,
        f"{plain / len(tokens) * 1e3:.2f}",
        f"{guessing / len(tokens) * 1e3:.2f}",
        f"{plain / guessing:.2f}x",
        f"{len(tokens) / steps:.1f}",
    ]
    print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llm.speculation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--method", choices=list(_CONFIGS), help="one method instead of all")
    parser.add_argument("--threads", type=int, default=1, help="of torch; one is measured with the least noise")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("| text | method | CPU ms a token without | with | faster | tokens a step |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        order = write_known_text(Path(place))
        for method, config in _CONFIGS.items():
            if arguments.method not in (None, method):
                continue
            engines = {False: opened(Path(place), None), True: opened(Path(place), config)}
            for name, (prompt, temperature) in prompts_of(order).items():
                params = SamplingParams(temperature=temperature, seed=1, max_tokens=_NUM_TOKENS, ignore_eos=True)

                def ask(engine: Engine, prompt: list[int] = prompt, params: SamplingParams = params) -> Any:
                    return answer(engine, prompt, params)

                compare(name, method, engines, ask, arguments.rounds)
            for engine in engines.values():
                engine.close()
    wanted = {"json": _SCHEMA, "disable_any_whitespace": True}
    params = SamplingParams(temperature=0.0, max_tokens=400, structured_outputs=wanted)
    engines = {
        False: opened(_TINY_CHAT, None, has_text=True),
        True: opened(_TINY_CHAT, _CONFIGS["ngram"], has_text=True),
    }
    tokenizer = engines[False].tokenizer
    assert tokenizer is not None, "tiny_chat has text"
    prompt = tokenizer.encode(f"People as JSON: {json.dumps(_SCHEMA)}")
    compare(
        "json by a schema (tiny_chat)",
        "ngram",
        engines,
        lambda engine: answer(engine, prompt, params),
        arguments.rounds,
    )
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
