"""`python -m benchmarks.llm.rerank`: documents that callers of `/rerank` get ranked per second, beside transformers.

Random weights in the shape of MiniLM-L6's cross-encoder, queries and documents of random words whose lengths are as
uneven as people's. 32 callers send requests of a few documents each to a server, over HTTP. The loops over
transformers' own network take the same requests one after the other, without HTTP: pair by pair, and as the padded
batch of each request. The ways are taken in turns, and of several rounds the best of each counts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from benchmarks.servers.ours import modelserver

Request = tuple[str, list[str]]
_SHAPE = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "num_labels": 1,
}
_NUM_THREADS = torch.get_num_threads()
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def write_cross_encoder(directory: Path) -> Path:
    """A checkpoint whose tokenizer has a token for each of the words `w0`, `w1`, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(**_SHAPE)).save_pretrained(directory)
    words = [*_SPECIAL, *(f"w{place}" for place in range(_SHAPE["vocab_size"] - len(_SPECIAL)))]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {f"{name.strip('[]').lower()}_token": name for name in _SPECIAL}
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **named}
    described["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (directory / "tokenizer_config.json").write_text(json.dumps(described))
    return directory


def random_requests(num_requests: int, num_documents: int) -> list[Request]:
    """Half of the documents have less than 40 words, a few some hundred; queries have about 8."""
    generator = np.random.default_rng(0)

    def text(median: float, most: int) -> str:
        length = int(np.clip(generator.lognormal(np.log(median), 0.7), 2, most))
        return " ".join(f"w{place}" for place in generator.integers(0, 30000, length))

    return [(text(8, 40), [text(40, 300) for _ in range(num_documents)]) for _ in range(num_requests)]


class Server:
    """`/rerank` of a server, called by `num_callers` at once."""

    def __init__(self, url: str, num_callers: int) -> None:
        self._clients = [httpx.Client(base_url=f"http://{url}", timeout=300) for _ in range(num_callers)]

    def __call__(self, requests: Sequence[Request]) -> list[list[float]]:
        num_callers = len(self._clients)
        found: list[list[float]] = [[] for _ in requests]

        def call(caller: int) -> None:
            for place in range(caller, len(requests), num_callers):
                query, documents = requests[place]
                body = {"query": query, "documents": documents, "return_documents": False}
                results = self._clients[caller].post("/rerank", json=body).raise_for_status().json()["results"]
                scores = {each["index"]: each["relevance_score"] for each in results}
                found[place] = [scores[index] for index in range(len(documents))]

        with ThreadPoolExecutor(num_callers) as pool:
            list(pool.map(call, range(num_callers)))
        return found


class Theirs:
    """transformers' tokenizer and network, request after request: pairs one by one, or in one padded batch."""

    def __init__(self, directory: Path, dtype: str, *, is_batched: bool) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self._is_batched = is_batched

    def __call__(self, requests: Sequence[Request]) -> list[list[float]]:
        torch.set_num_threads(_NUM_THREADS)
        return [self._rank(query, documents) for query, documents in requests]

    def _rank(self, query: str, documents: list[str]) -> list[float]:
        size = len(documents) if self._is_batched else 1
        found: list[float] = []
        for start in range(0, len(documents), size):
            some = documents[start : start + size]
            inputs = self._tokenizer([query] * len(some), some, padding=True, return_tensors="pt")
            with torch.inference_mode():
                found += torch.sigmoid(self._model(**inputs).logits[:, 0]).tolist()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llm.rerank", description=__doc__)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--callers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of all ways")
    arguments = parser.parse_args()
    requests = random_requests(arguments.requests, arguments.documents)
    num_pairs = sum(len(documents) for _, documents in requests)
    what = f"{num_pairs} pairs, {arguments.callers} callers, {arguments.dtype}"
    print(f"torch {torch.__version__}, {_NUM_THREADS} threads, {what}")
    with tempfile.TemporaryDirectory() as place:
        directory = write_cross_encoder(Path(place) / "ranker" / "1")
        (directory / "model.json").write_text(json.dumps({"dtype": arguments.dtype}))
        with modelserver(Path(place)) as server:
            ways: dict[str, Callable[[Sequence[Request]], list[list[float]]]] = {
                "this server": Server(f"127.0.0.1:{server.ports['http']}", arguments.callers),
                "transformers, pair by pair": Theirs(directory, arguments.dtype, is_batched=False),
                "transformers, a padded batch for each request": Theirs(directory, arguments.dtype, is_batched=True),
            }
            expected = ways["transformers, pair by pair"](requests[:8])
            best = dict.fromkeys(ways, 0.0)
            for way in ways.values():
                np.testing.assert_allclose(
                    way(requests[:8]), expected, atol=1e-4 if arguments.dtype == "float32" else 0.02
                )
            for _ in range(arguments.rounds):
                for name, rank in ways.items():
                    start_s = time.perf_counter()
                    rank(requests)
                    best[name] = max(best[name], num_pairs / (time.perf_counter() - start_s))
    print("| | documents/s |\n|---|--:|")
    for name, per_second in best.items():
        print(f"| {name} | {per_second:.0f} |")


if __name__ == "__main__":
    main()
