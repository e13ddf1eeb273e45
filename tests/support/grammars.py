"""Texts under a grammar: whether one matches, and random ones made token by token; what a schema says of both."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Collection, Sequence
from typing import Any

import jsonschema
import numpy as np
from modelserver_backends.llm.grammar import Grammar, allowed_mask, compile_grammar
from modelserver_backends.llm.text.tokenizer import Tokenizer
from support.tiny_tokenizers import byte_level

from modelserver.errors import InvalidArgumentError


@functools.cache
def json_tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(), special={"bos_token": "<s>", "eos_token": "</s>"})


def is_match(grammar: Grammar, text: str, tokenizer: Tokenizer | None = None) -> bool:
    """Whether a grammar allows a text, and lets it end there."""
    tokenizer = tokenizer or json_tokenizer()
    matcher = grammar.matcher()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return all(matcher.accept(token_id) for token_id in token_ids) and matcher.accepts(min(tokenizer.eos_token_ids))


def random_text(grammar: Grammar, tokenizer: Tokenizer, seed: int, max_tokens: int = 150) -> str | None:
    """A text of randomly chosen allowed tokens; None if it was still going on after `max_tokens`.

    The longer it gets, the rather it ends what it has begun: short tokens that close something go first.
    """
    rng, matcher = random.Random(seed), grammar.matcher()
    token_ids: list[int] = []
    while not matcher.is_terminated:
        if len(token_ids) == max_tokens:
            return None
        mask = allowed_mask(matcher)
        allowed = np.flatnonzero(mask).tolist()
        assert allowed, "no token is allowed and the text is not at its end"
        closing = [one for one in allowed if tokenizer.token_bytes(one) in (b"]", b"}", b'"', b"}}", b'"}')]
        ending = [one for one in allowed if one in tokenizer.eos_token_ids]
        if ending and rng.random() < 0.3:
            allowed = ending
        elif closing and rng.random() < len(token_ids) / 60:
            allowed = closing
        token_id = rng.choice(allowed)
        assert matcher.accepts(token_id)
        assert matcher.accept(token_id)
        if token_id in tokenizer.eos_token_ids:
            break
        token_ids.append(token_id)
    return tokenizer.decode(token_ids)


def check_texts(grammar: Grammar, schema: Any, *, seed: int = 0, num_texts: int = 20, max_tokens: int = 150) -> int:
    """Make texts of the grammar of a schema, and assert that an independent validator takes each; how many ended."""
    made = [random_text(grammar, json_tokenizer(), seed + turn, max_tokens) for turn in range(num_texts)]
    ended = [text for text in made if text is not None]
    for text in ended:
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
    return len(ended)


def check_schema(schema: Any, seed: int, *, refusals: Collection[str], max_tokens: int) -> None:
    """Assert that three texts of a schema are valid by it, or that it is refused in one of these words."""
    refusal = ""
    try:
        grammar = compile_grammar({"json": schema}, json_tokenizer())
    except InvalidArgumentError as error:
        refusal = error.message
    if refusal:
        assert any(word in refusal for word in refusals), refusal
    else:
        check_texts(grammar, schema, seed=seed, num_texts=3, max_tokens=max_tokens)


def check_examples(schema: Any, good: Sequence[str], bad: Sequence[str]) -> None:
    """Assert that the grammar of a schema allows these texts, and not those."""
    grammar = compile_grammar({"json": schema}, json_tokenizer())
    assert [text for text in good if not is_match(grammar, text)] == []
    assert [text for text in bad if is_match(grammar, text)] == []
