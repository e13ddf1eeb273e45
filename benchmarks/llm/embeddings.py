"""`python -m benchmarks.llm.embeddings`: texts that an encoder embeds per second, beside loops over transformers' own.

Random weights in the shape of MiniLM-L6, and token ids of random texts whose lengths are as uneven as people's. The
`llm` backend's encoder takes them in order of arrival, as many waiting as its instance lets wait; the loops take them
in batches of 32 as they come, one by one, or in batches sorted beforehand, which nobody can do who serves. With
`--decoder` a decoder of 2 M parameters embeds them: one by one, as many as a step takes while something is generated,
and as many as it takes else. Of several rounds, taken in turns, the best of each counts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.embedding.encoder import Encoder
from modelserver_backends.llm.embedding.instance import plan_batch
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.runner import Runner, load_runner
from modelserver_backends.llm.sampler import Sampler
from tokenizers import Tokenizer, models

from benchmarks.llm.shapes import SHAPES, write_checkpoint

_SHAPE = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
_BATCH = 32
_NUM_THREADS = torch.get_num_threads()
Vectors = np.ndarray[Any, np.dtype[np.float32]]
Embed = Callable[[list[list[int]]], Vectors]


def write_encoder(directory: Path) -> Path:
    from transformers import BertConfig, BertModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    BertModel(BertConfig(**_SHAPE)).save_pretrained(directory)
    # Ids are given, so that the tokenizer needs no words.
    Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]", "unk_token": "[UNK]"}))
    return directory


def random_texts(num_texts: int) -> list[list[int]]:
    """Token ids; half of the texts have less than 24 tokens, a few some hundred."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(np.log(24), 0.8, num_texts).astype(int), 4, 400)
    return [generator.integers(2, _SHAPE["vocab_size"], length).tolist() for length in lengths]


class Ours:
    """What `EncoderInstance` does with requests that have all arrived."""

    def __init__(self, directory: Path) -> None:
        self._options = EngineOptions(device="cpu", dtype="float32", num_threads=_NUM_THREADS)
        self._encoder = Encoder.from_checkpoint(open_checkpoint(directory), self._options)

    def __call__(self, texts: list[list[int]]) -> Vectors:
        max_rows, max_tokens = self._options.max_num_seqs, self._options.max_num_batched_tokens
        vectors: dict[int, Vectors] = {}
        left = list(range(len(texts)))
        while left:
            waiting = left[: 2 * max_rows]
            lengths = [len(texts[place]) for place in waiting]
            chosen = [waiting[at] for at in plan_batch(lengths, max_tokens=max_tokens, max_rows=max_rows)]
            vectors |= zip(chosen, self._encoder.embed([texts[place] for place in chosen]), strict=True)
            left = [place for place in left if place not in vectors]
        return np.stack([vectors[place] for place in range(len(texts))])


class OurDecoder:
    """What `LlmInstance` does with requests that have all arrived, in steps of `max_tokens`."""

    def __init__(self, runner: Runner, max_tokens: int) -> None:
        self._runner = runner
        self._max_tokens = max_tokens

    def __call__(self, texts: list[list[int]]) -> Vectors:
        vectors: list[Vectors] = []
        step: list[list[int]] = []
        for text in texts:
            if step and sum(map(len, step)) + len(text) > self._max_tokens:
                vectors += self._runner.embed(step)
                step = []
            step.append([token_id % self._runner.vocab_size for token_id in text])
        return np.stack(vectors + self._runner.embed(step))


class Theirs:
    """Mean pooling over transformers' own model, in padded batches of `batch`."""

    def __init__(self, directory: Path, batch: int, *, is_sorted: bool = False) -> None:
        from transformers import AutoModel

        self._model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
        self._batch = batch
        self._is_sorted = is_sorted

    def __call__(self, texts: list[list[int]]) -> Vectors:
        order = sorted(range(len(texts)), key=lambda place: len(texts[place])) if self._is_sorted else range(len(texts))
        vectors = np.empty((len(texts), _SHAPE["hidden_size"]), np.float32)
        torch.set_num_threads(_NUM_THREADS)
        for start in range(0, len(texts), self._batch):
            places = list(order[start : start + self._batch])
            vectors[places] = self._embed([texts[place] for place in places])
        return vectors

    def _embed(self, texts: Sequence[Sequence[int]]) -> Vectors:
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(text)) for text in texts], batch_first=True)
        with torch.inference_mode():
            hidden = self._model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
            pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        found: Vectors = pooled.numpy()
        return found


def encoder_ways(place: Path) -> dict[str, Embed]:
    directory = write_encoder(place)
    return {
        "the llm backend's encoder": Ours(directory),
        f"transformers, batches of {_BATCH}": Theirs(directory, _BATCH),
        "transformers, one by one": Theirs(directory, 1),
        f"transformers, batches of {_BATCH} sorted by length": Theirs(directory, _BATCH, is_sorted=True),
    }


def decoder_ways(place: Path) -> dict[str, Embed]:
    options = EngineOptions(device="cpu", dtype="float32", max_model_len=512, num_gpu_blocks_override=40)
    runner = load_runner(open_checkpoint(write_checkpoint(place, SHAPES["tiny (2 M)"])), options, Sampler)
    return {f"a decoder, {most} tokens at once": OurDecoder(runner, most) for most in (1, 256, 2048)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llm.embeddings", description=__doc__)
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--decoder", action="store_true")
    arguments = parser.parse_args()
    texts = random_texts(arguments.texts)
    print(f"torch {torch.__version__}, {_NUM_THREADS} threads, {len(texts)} texts of {sum(map(len, texts))} tokens")
    with tempfile.TemporaryDirectory() as place:
        ways = decoder_ways(Path(place)) if arguments.decoder else encoder_ways(Path(place))
        expected = next(iter(ways.values()))(texts)
        best = dict.fromkeys(ways, 0.0)
        for _ in range(arguments.rounds):
            for name, embed in ways.items():
                start_s = time.perf_counter()
                found = embed(texts)
                best[name] = max(best[name], len(texts) / (time.perf_counter() - start_s))
                np.testing.assert_allclose(found, expected, atol=1e-4)
    print("| | texts/s |\n|---|--:|")
    for name, per_second in best.items():
        print(f"| {name} | {per_second:.0f} |")


if __name__ == "__main__":
    main()
