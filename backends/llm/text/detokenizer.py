"""Tokens to text as they come: complete characters only, and together what decoding all of them gives.

A prompt is context: the first new token may complete a character that its last token begins, and no space is dropped
after it.
"""

from __future__ import annotations

import abc
import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .token_bytes import TokenBytes
    from .tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Tokens of a prompt that are looked at for an unfinished character, which is at most three bytes.
_NUM_CONTEXT_TOKENS = 16


class Detokenizer(abc.ABC):
    """The text of one sequence."""

    __slots__ = ()

    @abc.abstractmethod
    def push(self, token_ids: Sequence[int]) -> str:
        """The characters that these tokens complete."""

    @abc.abstractmethod
    def flush(self) -> str:
        """The rest at the end: replacement characters for an unfinished one. Nothing may be pushed after it."""


def make_detokenizer(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
) -> Detokenizer:
    """The detokenizer of what follows a prompt."""
    token_bytes = tokenizer.concatenation
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
    if token_bytes is None:
        return WindowDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)
    table = tokenizer.visible_bytes if skip_special_tokens else token_bytes.table
    if token_bytes.byte_token_ids:
        return FallbackDetokenizer(token_bytes, table, prompt_token_ids, skipped)
    return BytesDetokenizer(token_bytes, table, prompt_token_ids, skipped)


def _has_text(table: Sequence[bytes], prompt_token_ids: Iterable[int]) -> bool:
    return any(table[token_id] for token_id in prompt_token_ids if token_id < len(table))


class BytesDetokenizer(Detokenizer):
    """Tokens are bytes of UTF-8. What is not UTF-8 becomes replacement characters, as in a decode of the whole."""

    __slots__ = ("_decode", "_is_first_stripped", "_num_stripped", "_size", "_table")

    def __init__(
        self,
        token_bytes: TokenBytes,
        table: Sequence[bytes],
        prompt_token_ids: Sequence[int],
        skipped: frozenset[int],
    ) -> None:
        self._table = table
        self._size = len(table)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        is_start = not _has_text(table, prompt_token_ids)
        self._num_stripped = token_bytes.num_stripped if is_start else 0
        is_first = is_start and all(token_id in skipped for token_id in prompt_token_ids)
        self._is_first_stripped = token_bytes.is_first_stripped and is_first
        last = prompt_token_ids[-_NUM_CONTEXT_TOKENS:]
        self._decode(_unfinished(b"".join(table[token_id] for token_id in last if token_id < self._size)))

    def push(self, token_ids: Sequence[int]) -> str:
        table, size = self._table, self._size
        if len(token_ids) == 1 and not self._num_stripped and not self._is_first_stripped:
            return self._decode(table[token_ids[0]]) if token_ids[0] < size else ""
        pieces = [table[token_id] for token_id in token_ids if token_id < size]
        if self._num_stripped or self._is_first_stripped:
            pieces = self._strip(pieces)
        return self._decode(b"".join(pieces))

    def _strip(self, pieces: list[bytes]) -> list[bytes]:
        """Drop the spaces that a text does not start with."""
        pieces = [piece for piece in pieces if piece]
        if not pieces:
            return pieces
        if self._is_first_stripped:
            self._is_first_stripped = False
            return [pieces[0].replace(b" ", b""), *pieces[1:]]
        text = b"".join(pieces)
        kept = text.lstrip(b" ")
        num_dropped = min(len(text) - len(kept), self._num_stripped)
        self._num_stripped = 0 if kept else self._num_stripped - num_dropped
        return [text[num_dropped:]]

    def flush(self) -> str:
        return self._decode(b"", True)


def _unfinished(text: bytes) -> bytes:
    """The bytes at the end that begin a character and do not end it."""
    for length in (1, 2, 3):
        if length <= len(text) and text[-length] >= 0xC0:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            decoder.decode(text[-length:])
            return decoder.getstate()[0]
    return b""


class FallbackDetokenizer(Detokenizer):
    """Most tokens are text; those that are a byte wait until their character is complete.

    A run of bytes that is no UTF-8 gives one replacement character for each byte, as `tokenizers` does; only the
    characters that were complete before the run went wrong have been given by then, and stay.
    """

    __slots__ = ("_byte_token_ids", "_is_first_stripped", "_is_wrong", "_num_stripped", "_run", "_size", "_table")

    def __init__(
        self,
        token_bytes: TokenBytes,
        table: Sequence[bytes],
        prompt_token_ids: Sequence[int],
        skipped: frozenset[int],
    ) -> None:
        self._table = table
        self._size = len(table)
        self._byte_token_ids = token_bytes.byte_token_ids
        is_start = not _has_text(table, prompt_token_ids)
        self._num_stripped = token_bytes.num_stripped if is_start else 0
        is_first = is_start and all(token_id in skipped for token_id in prompt_token_ids)
        self._is_first_stripped = token_bytes.is_first_stripped and is_first
        self._run = _unfinished(self._last_run(prompt_token_ids, skipped))
        self._is_wrong = False

    def _last_run(self, prompt_token_ids: Sequence[int], skipped: frozenset[int]) -> bytes:
        run = b""
        for token_id in reversed(prompt_token_ids[-_NUM_CONTEXT_TOKENS:]):
            if token_id in self._byte_token_ids:
                run = self._table[token_id] + run
            elif token_id not in skipped:
                break
        return run

    def push(self, token_ids: Sequence[int]) -> str:
        given = []
        for token_id in token_ids:
            if token_id in self._byte_token_ids:
                self._is_first_stripped = False
                given.append(self._byte(self._table[token_id]))
            elif token_id < self._size and (piece := self._table[token_id]):
                if self._is_first_stripped:
                    self._is_first_stripped = False
                    piece = piece.replace(b" ", b"")
                given.append((self._end_run() if self._run or self._is_wrong else "") + piece.decode())
        text = "".join(given)
        return self._strip(text) if text and self._num_stripped else text

    def _byte(self, byte: bytes) -> str:
        if self._is_wrong:
            return _REPLACEMENT
        self._run += byte
        try:
            text = self._run.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            self._is_wrong = True
            text = _REPLACEMENT * len(self._run)
        self._run = b""
        return text

    def _end_run(self) -> str:
        left, self._run, self._is_wrong = len(self._run), b"", False
        return _REPLACEMENT * left

    def _strip(self, text: str) -> str:
        kept = text.lstrip(" ")
        num_dropped = min(len(text) - len(kept), self._num_stripped)
        self._num_stripped = 0 if kept else self._num_stripped - num_dropped
        return text[num_dropped:]

    def flush(self) -> str:
        return self._end_run()


class WindowDetokenizer(Detokenizer):
    """Any other decoder: the tokens since the last complete text are decoded with those before them, and without.

    Two decodes per token, whose length does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        self._num_given = len(self._window)
        self._given = self._text(self._window)

    def push(self, token_ids: Sequence[int]) -> str:
        self._window.extend(token_ids)
        text = self._text(self._window)
        # Four tokens can be the bytes of one character; what they do not make up stays wrong.
        if text.endswith(_REPLACEMENT) and len(self._window) - self._num_given < 4:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._text(self._window))

    def _advance(self, text: str) -> str:
        delta = text[len(self._given) :]
        self._num_given = len(self._window)
        if self._num_given > 2 * _NUM_CONTEXT_TOKENS:
            self._window = self._window[-_NUM_CONTEXT_TOKENS:]
            text = self._text(self._window)
        self._given = text
        return delta

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
