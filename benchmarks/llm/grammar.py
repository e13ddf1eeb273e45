"""What constrained decoding costs: `python -m benchmarks.llm.grammar`.

Microseconds of CPU for the mask of one sequence (median over the tokens of a text), with a vocabulary of 150,000
tokens, for each engine that is installed; and milliseconds to compile the grammar, once the vocabulary is read.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from modelserver_backends.llm.grammar import ENGINES, compile_grammar, fill_masks
from modelserver_backends.llm.grammar.compile import is_installed

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "schema": (
        {"json": PERSON},
        '{"name": "Ada Lovelace the first", "age": 36, "tags": ["red", "blue"], "home": null}',
    ),
    "any JSON": ({"json_object": True}, '{"some key": [1, 2.5, {"other": "a text of several words"}], "last": true}'),
    "pattern": (
        {"json": {"type": "string", "pattern": "^[A-Z][a-z]+( [a-z]+){3,9}$"}},
        '"The quick brown fox jumps over"',
    ),
    "regex": ({"regex": r"(\w+ ){2,20}\d{4}-\d\d-\d\d"}, "some words before 2024-02-03"),
    "choice": ({"choice": [f"label {number}" for number in range(100)]}, "label 77"),
}


class LargeVocabulary:
    """Stands in for the tokenizer of a large model: single bytes, words with and without a blank, and punctuation."""

    def __init__(self, size: int) -> None:
        draw = random.Random(3)
        letters = "etaoinshrdlucmfwypvbgkjqxz"
        pieces = {bytes((byte,)): None for byte in range(256)}
        pieces |= dict.fromkeys(
            text.encode() for text in ('{"', '":', '", "', '"}', '",', "], ", '"]', " {", '": ', "  ", "\n\n")
        )
        pieces |= dict.fromkeys(str(number).encode() for number in range(1000))
        while len(pieces) < size - 2:
            word = "".join(draw.choice(letters[: draw.randint(4, 26)]) for _ in range(draw.randint(2, 9)))
            pieces[(draw.choice(["", " ", " "]) + draw.choice([word, word.title()])).encode()] = None
        self.visible_bytes = (*pieces, b"", b"")
        self.vocab_size = len(self.visible_bytes)
        self.bos_token_id, self.eos_token_id = size - 2, size - 1
        self.eos_token_ids = frozenset({size - 1})
        self.special_ids = frozenset({size - 2, size - 1})
        self.grammar_compiler: object | None = None
        self._ids = {piece: number for number, piece in enumerate(pieces)}

    def token_bytes(self, token_id: int) -> bytes:
        return self.visible_bytes[token_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        rest, found = text.encode(), []
        while rest:
            length = next(length for length in range(min(16, len(rest)), 0, -1) if rest[:length] in self._ids)
            found.append(self._ids[rest[:length]])
            rest = rest[length:]
        return found


def masks_us(grammar: Any, token_ids: list[int], num_rows: int, clock: Callable[[], int]) -> float:
    """The median time of a mask of one sequence where `num_rows` are filled at once, over the tokens of a text."""
    matchers = [grammar.matcher() for _ in range(num_rows)]
    times = []
    for token_id in token_ids:
        began = clock()
        fill_masks(matchers)
        times.append((clock() - began) / num_rows / 1000)
        for matcher in matchers:
            assert matcher.accept(token_id), f"token {token_id} is refused"
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    arguments = parser.parse_args()
    tokenizer: Any = LargeVocabulary(arguments.vocabulary)
    for engine in ENGINES:
        if not is_installed(engine):
            print(f"{engine}: {ENGINES[engine].LIBRARY} is not installed")
            continue
        began = time.process_time()
        compile_grammar({"json": {"type": "null"}}, tokenizer, engine=engine, deadline_s=60)
        print(f"{engine}: ready after {time.process_time() - began:.2f} s of CPU")
        for name, (asked, text) in CASES.items():
            began = time.process_time()
            grammar = compile_grammar(asked, tokenizer, engine=engine, deadline_s=60)
            compile_ms = (time.process_time() - began) * 1000
            token_ids = tokenizer.encode(text)
            masks_us(grammar, token_ids, 1, time.process_time_ns)  # what is computed once
            columns = []
            for rows in arguments.rows:
                cpu_us = masks_us(grammar, token_ids, rows, time.process_time_ns)
                wall_us = masks_us(grammar, token_ids, rows, time.perf_counter_ns)
                columns.append(f"{rows} rows: {cpu_us:7.1f} us CPU, {wall_us:7.1f} us")
            kind = type(grammar).__name__.removesuffix("Grammar")
            print(f"  {name:9} {kind:9} compiled in {compile_ms:6.1f} ms   " + "   ".join(columns))


if __name__ == "__main__":
    main()
