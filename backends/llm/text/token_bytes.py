"""The bytes that each token contributes to a text, read from the decoder of a tokenizer.json.

Decoders that are a concatenation, which those of language models are, become a table: byte-level BPE (GPT-2, Llama 3,
Qwen), and SentencePiece's with byte fallback or without (Llama 2, Mistral, Gemma, Phi-3).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """`table[token_id]` are the token's bytes, b"" for ids without a token.

    `byte_token_ids`: tokens that are one byte of a character that the vocabulary lacks. At the start of a text
    `num_stripped` spaces are dropped, or all those of the first token (`is_first_stripped`).
    """

    table: tuple[bytes, ...]
    byte_token_ids: frozenset[int] = frozenset()
    num_stripped: int = 0
    is_first_stripped: bool = False


def read_token_bytes(decoder: Mapping[str, Any] | None, vocabulary: Mapping[str, int]) -> TokenBytes | None:
    """The table of a decoder (the "decoder" of tokenizer.json); None if it does not concatenate tokens."""
    if decoder is None:
        return None
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [dict(decoder)]
    kinds = [step["type"] for step in steps if step["type"] != "Fuse"]
    if kinds == ["ByteLevel"]:
        return TokenBytes(_table(vocabulary, _byte_level_bytes))
    if kinds in (["Metaspace"], ["ByteFallback", "Metaspace"]):
        return _metaspace(steps, vocabulary)
    return _replacing(steps, vocabulary)


def _table(vocabulary: Mapping[str, int], to_bytes: Callable[[str], bytes]) -> tuple[bytes, ...]:
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = to_bytes(token)
    return tuple(table)


def _byte_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters are their own bytes, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()
BYTE_CHARACTERS = _BYTE_OF_CHARACTER.keys()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:  # an added token, which is plain text
        return token.encode()


def _metaspace(steps: list[dict[str, Any]], vocabulary: Mapping[str, int]) -> TokenBytes:
    metaspace = steps[-1]
    has_bytes = steps[0]["type"] == "ByteFallback"
    table = _table(vocabulary, lambda token: _plain_bytes(token, [(metaspace["replacement"], " ")], has_bytes))
    is_stripped = metaspace.get("prepend_scheme", "always") != "never"
    return TokenBytes(table, _byte_tokens(vocabulary) if has_bytes else frozenset(), 0, is_stripped)


def _replacing(steps: list[dict[str, Any]], vocabulary: Mapping[str, int]) -> TokenBytes | None:
    """Replace*, ByteFallback?, Fuse?, Strip? in this order."""
    replaced: list[tuple[str, str]] = []
    has_bytes, num_stripped, stage = False, 0, 0
    for step in steps:
        kind = step["type"]
        order = ("Replace", "ByteFallback", "Fuse", "Strip").index(kind) if kind in _REPLACING else -1
        if order < stage:
            return None
        stage = order
        if kind == "Replace":
            if "String" not in step["pattern"]:
                return None
            replaced.append((step["pattern"]["String"], step["content"]))
        elif kind == "ByteFallback":
            has_bytes = True
        elif kind == "Strip":
            if step["content"] != " " or step["stop"] != 0:
                return None
            num_stripped = step["start"]
    if num_stripped and "Fuse" not in [step["type"] for step in steps]:
        return None  # every token would lose its space
    table = _table(vocabulary, lambda token: _plain_bytes(token, replaced, has_bytes))
    return TokenBytes(table, _byte_tokens(vocabulary) if has_bytes else frozenset(), num_stripped)


_REPLACING = frozenset({"Replace", "ByteFallback", "Fuse", "Strip"})


def _plain_bytes(token: str, replaced: list[tuple[str, str]], has_bytes: bool) -> bytes:
    for pattern, content in replaced:
        token = token.replace(pattern, content)
    match = _BYTE_TOKEN.match(token) if has_bytes else None
    return bytes([int(match.group(1), 16)]) if match else token.encode()


def _byte_tokens(vocabulary: Mapping[str, int]) -> frozenset[int]:
    return frozenset(token_id for token, token_id in vocabulary.items() if _BYTE_TOKEN.match(token))
