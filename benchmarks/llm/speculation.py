"""`python -m benchmarks.llm.speculation`: streams with and without guessed tokens, side by side in CPU time.

The network is of random weights, but writes a text that is known: its head gives each token one that follows. So texts
can be as much like their prompts as wanted, and every layer computes as in any network of its size. The EAGLE head
is the right one for it, or one of random weights, which guesses wrong. Each row is the median of several rounds in
turns; the texts of both ways must be equal. `json` is tiny_chat's, with a schema.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
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
# A draft model is a quarter as wide and has a third of the layers. Each wrong token of its order spoils three guesses,
# so that about one of eight is wrong.
_DRAFT_SHAPE = _llama(96, 256, 2, (2, 1, 48), _VOCAB)
_DRAFT_SHARE_WRONG = 1 / 24
_CONFIGS: dict[str, Mapping[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
    "suffix, answer known": {"method": "suffix"},
    "draft_model": {"method": "draft_model", "model": "that of the benchmark"},
    "eagle": {"method": "eagle", "model": "that of the benchmark"},
    "eagle, all wrong": {"method": "eagle", "model": "that of the benchmark"},
}
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


def write_known_text(directory: Path, shape: Mapping[str, Any], order: list[int]) -> Path:
    """A checkpoint whose greedy text goes through the tokens of `order`."""
    write_checkpoint(directory, shape)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    embeddings = tensors["model.embed_tokens.weight"]
    head = torch.zeros_like(embeddings)
    head[order[1:]] = embeddings[order[:-1]] * (20.0 / embeddings.norm(dim=1)[order[:-1], None])
    tensors["lm_head.weight"] = head
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 1e-3
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


def write_eagle(directory: Path, base: Path, *, is_right: bool) -> Path:
    """A head whose states are a token's embedding, of which the network's own head makes the next token; or random."""
    tensors = load_file(base / "model.safetensors")
    width = tensors["model.norm.weight"].shape[0]
    joined = torch.cat((torch.eye(width), torch.zeros(width, width)), dim=1)
    found = {"fc.weight": joined if is_right else torch.randn(joined.shape) * width**-0.5}
    found |= {
        name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if ".layers.0." in name and "input_layernorm" not in name
    }
    directory.mkdir()
    save_file(found, directory / "model.safetensors", metadata={"format": "pt"})
    entries = json.loads((base / "config.json").read_text())
    described = {**entries, "architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(described))
    return directory


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


def opened(
    directory: Path, config: Mapping[str, Any] | None, draft: Path | None = None, *, num_streams: int = 1
) -> Engine:
    """With text where the checkpoint is a whole one."""
    if config is not None:
        # A step has room for drafts of so many sequences; all of these are to get as many as they may.
        config = {**config, "disable_by_batch_size": 4 * num_streams}
    options = EngineOptions(
        device="cpu",
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=num_streams,
        enable_prefix_caching=False,
        speculative_config=read_speculative_config("speculative_config", config),
    )
    with ExitStack() as opened:
        checkpoint = opened.enter_context(open_checkpoint(directory))
        if (directory / "tokenizer.json").exists():
            return Engine.from_checkpoint(checkpoint, options)
        drafter = None
        if draft is not None:
            own = replace(options, speculative_config=None)
            drafter = load_runner(opened.enter_context(open_checkpoint(draft)), own, Sampler)
        runner = load_runner(checkpoint, options, Sampler)
        return Engine(options=options, runner=runner, tokenizer=None, drafter=drafter)


@dataclass
class Course:
    """The tokens of each stream, the CPU seconds of steps after the first tokens, and how many these steps were."""

    engine: Engine
    tokens: list[list[int]] = field(default_factory=list)
    numbers: dict[GenerationRequest, int] = field(default_factory=dict)
    seconds: float = 0.0
    num_steps: int = 0

    def add(self, prompt: list[int], params: SamplingParams) -> None:
        request = GenerationRequest(prompt_token_ids=prompt, params=params)
        self.numbers[request] = len(self.tokens)
        self.tokens.append([])
        self.engine.add(request)

    @property
    def num_tokens(self) -> int:
        """After the first of each stream."""
        return sum(len(tokens) - 1 for tokens in self.tokens)

    def step(self) -> None:
        is_first = not all(self.tokens)
        began = time.process_time()
        outputs = self.engine.step()
        if not is_first:
            self.seconds += time.process_time() - began
            self.num_steps += 1
        for output in outputs:
            self.tokens[self.numbers[output.request]] += output.token_ids


def race(
    engines: Mapping[bool, Engine], prompt: list[int], params: SamplingParams, num_streams: int
) -> dict[bool, Course]:
    """The same requests to engines with and without guesses, step by step in turns: both meet the same disturbances."""
    courses = {is_guessing: Course(engine) for is_guessing, engine in engines.items()}
    for course in courses.values():
        for _ in range(num_streams):
            course.add(prompt, params)
    while any(course.engine.has_work for course in courses.values()):
        for course in courses.values():
            if course.engine.has_work:
                course.step()
    return courses


def compare(
    name: str,
    method: str,
    engines: Mapping[bool, Engine],
    prompt: list[int],
    params: SamplingParams,
    *,
    rounds: int,
    num_streams: int = 1,
) -> None:
    races = [race(engines, prompt, params, num_streams) for _ in range(rounds)]
    for found in races:
        assert found[False].tokens == found[True].tokens, f"{name}: {method} has changed the text"
    last = races[-1][True]
    num_tokens = last.num_tokens
    plain, guessing = (statistics.median(found[way].seconds / num_tokens for found in races) for way in (False, True))
    ratio = statistics.median(found[False].seconds / found[True].seconds for found in races)
    steps = f"{num_tokens / num_streams / last.num_steps:.1f}"
    print(f"| {name} | {method} | {plain * 1e3:.2f} | {guessing * 1e3:.2f} | {ratio:.2f}x | {steps} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llm.speculation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--method", choices=list(_CONFIGS), help="one method instead of all")
    parser.add_argument("--streams", type=int, default=1, help="requests at once, with guesses for all of them")
    parser.add_argument("--threads", type=int, default=1, help="of torch; one is measured with the least noise")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("| text | method | CPU ms a token without | with | faster | tokens a step |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        order = list(range(10, _VOCAB))
        draw = random.Random(0)
        draw.shuffle(order)
        directory = write_known_text(Path(place) / "model", _SHAPE, order)
        nearly = [draw.choice(order) if draw.random() < _DRAFT_SHARE_WRONG else token for token in order]
        drafts = {
            "draft_model": write_known_text(Path(place) / "draft", _DRAFT_SHAPE, nearly),
            "eagle": write_eagle(Path(place) / "eagle", directory, is_right=True),
            "eagle, all wrong": write_eagle(Path(place) / "wrong", directory, is_right=False),
        }
        for method, config in _CONFIGS.items():
            if arguments.method not in (None, method):
                continue
            draft = drafts.get(method)
            if draft is not None:
                config = {**config, "model": str(draft)}
            engines = {
                False: opened(directory, None, num_streams=arguments.streams),
                True: opened(
                    directory, config, draft if method == "draft_model" else None, num_streams=arguments.streams
                ),
            }
            for name, (prompt, temperature) in prompts_of(order).items():
                params = SamplingParams(temperature=temperature, seed=1, max_tokens=_NUM_TOKENS, ignore_eos=True)
                compare(
                    name,
                    method,
                    engines,
                    prompt,
                    params,
                    rounds=arguments.rounds,
                    num_streams=arguments.streams,
                )
            for engine in engines.values():
                engine.close()
    wanted = {"json": _SCHEMA, "disable_any_whitespace": True}
    params = SamplingParams(temperature=0.0, max_tokens=400, structured_outputs=wanted)
    engines = {
        False: opened(_TINY_CHAT, None),
        True: opened(_TINY_CHAT, _CONFIGS["ngram"]),
    }
    tokenizer = engines[False].tokenizer
    assert tokenizer is not None, "tiny_chat has text"
    prompt = tokenizer.encode(f"People as JSON: {json.dumps(_SCHEMA)}")
    compare("json by a schema (tiny_chat)", "ngram", engines, prompt, params, rounds=arguments.rounds)
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
