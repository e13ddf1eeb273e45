"""Counts are kept token by token, and are those of a count from scratch."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from modelserver_backends.llm.sampler_state import TokenCounts

TOKENS = st.lists(st.integers(0, 300), max_size=200)


@given(TOKENS, st.lists(TOKENS, max_size=4), st.booleans())
def test_counts_equal_a_count_from_scratch(prompt: list[int], pieces: list[list[int]], has_prompt: bool) -> None:
    counts = TokenCounts(prompt, has_prompt=has_prompt)
    token_ids = list(prompt)
    for piece in pieces:
        token_ids += piece
        counts.update(token_ids)
        expected = Counter(token_ids[len(prompt) :])
        if has_prompt:
            expected.update(dict.fromkeys(prompt, 0))
        assert {word % 2**40: word >> 40 for word in counts.words.tolist()} == dict(expected)
