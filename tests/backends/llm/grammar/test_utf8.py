"""Ranges of characters and ranges of their bytes are the same characters."""

from __future__ import annotations

import itertools

import pytest
from modelserver_backends.llm.grammar.utf8 import byte_sequences


def _characters(low: int, high: int) -> list[str]:
    """All that the sequences make."""
    return [
        bytes(byte_values).decode()
        for sequence in byte_sequences(low, high)
        for byte_values in itertools.product(*(range(first, last + 1) for first, last in sequence))
    ]


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0x00, 0x7F),
        (0x41, 0x41),
        (0x7F, 0x80),
        (0x80, 0x7FF),
        (0x7A, 0x3C5),
        (0x7FF, 0x800),
        (0xE9, 0x1234),
        (0x800, 0xD7FF),
        (0xE000, 0xFFFF),
        (0xFFFE, 0x10003),
        (0x10000, 0x10FFF),
        (0x10FFF0, 0x10FFFF),
        (0x1F600, 0x1F64F),
    ],
)
def test_every_character_once(low: int, high: int) -> None:
    assert sorted(_characters(low, high)) == [chr(code) for code in range(low, high + 1)]


def test_all_characters_need_few_sequences() -> None:
    assert sum(len(list(byte_sequences(*part))) for part in ((0, 0xD7FF), (0xE000, 0x10FFFF))) < 12
