"""The tokenizer of a checkpoint: text to token ids and back, special tokens, and the chat template."""

from __future__ import annotations

import codecs
import os
import sys
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import orjson
import tokenizers

from modelserver.backend import Array, InvalidArgumentError

from ..checkpoint import Checkpoint
from .chat_template import ChatTemplates, special_tokens
from .cuts import find_cuts, max_token_bytes
from .token_bytes import TokenBytes, read_token_bytes

# Called with the number of tokens read so far, and whether these are all; it raises to end the reading.
LengthCheck = Callable[[int, bool], None]
# Characters from which a text is read while other threads of Python run. Shorter ones are read before another thread
# would get its turn, and need not wait for the library's own threads, on which long ones are read.
LONG_TEXT = 4096
# Characters of the parts in which a long text is read: the library takes up to 250 bytes for each.
_PART_SIZE = 16384
# The longest part that is read where a text cannot be cut. The library's list of its tokens is made in one call.
_MAX_PART_SIZE = 1 << 18
# The longest text that is read as a whole, for a tokenizer whose texts cannot be cut.
_MAX_WHOLE_SIZE = 1 << 20
# Token ids without a token that a vocabulary may have: tables have an entry for each id.
_MOST_GAPS = 1 << 20
# Bytes of a long text that are decoded at a time, and token ids that are copied at a time.
_DECODED_AT_ONCE = 1 << 16
_IDS_AT_ONCE = 1 << 14
# By how much the library's threads give way to all others, among them the event loop: they get a third of a processor
# that both want.
_NICENESS = 5


def any_length(num_tokens: int, is_all: bool) -> None:
    """Of a text that may be of any length."""


@cache
def _start_readers() -> None:
    """Start the library's threads, which read long texts, with a lower priority: new threads have their maker's.

    These threads never hold the interpreter's lock, so that nothing waits for them but the request.
    """

    def start() -> None:
        if sys.platform == "linux":  # elsewhere all threads of a process have one priority
            priority = os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), priority)
        tokenizers.Tokenizer(tokenizers.models.BPE()).encode_batch_fast(["", ""])

    thread = threading.Thread(target=start, name="llm-text-start")
    thread.start()
    thread.join()


def _is_of_library(error: BaseException) -> bool:
    """Bare exceptions, and its panics, which no `except Exception` catches; their class cannot be imported."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


@contextmanager
def _reading() -> Iterator[None]:
    """While the library reads a text. InvalidArgumentError for one that it refuses."""
    try:
        yield
    except TypeError:
        raise InvalidArgumentError("the text is not Unicode: it has half of a surrogate pair") from None
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"the text is not UTF-8: {error.reason}") from None
    except BaseException as error:
        if not _is_of_library(error):
            raise
        raise InvalidArgumentError(f"the model's tokenizer cannot read the text: {error}") from None


def both_checks(first: LengthCheck, second: LengthCheck) -> LengthCheck:
    """One check of two."""

    def check(num_tokens: int, is_all: bool) -> None:
        first(num_tokens, is_all)
        second(num_tokens, is_all)

    return check


class Tokenizer:
    """Immutable, and safe to use from any thread. `special_ids` are the tokens that a reader does not see."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        special: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        templates: Mapping[str, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.special_tokens = dict(special or {})
        # Where `grammar/` keeps what it has made of the vocabulary.
        self.grammar_compiler: object | None = None
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocabulary.values(), default=-1) + 1
        if self.vocab_size > _MOST_GAPS + len(self._vocabulary):
            raise InvalidArgumentError(
                f"the tokenizer has {len(self._vocabulary)} tokens, with ids up to {self.vocab_size - 1}: too many ids "
                "between them are not used"
            )
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.pad_token_id = self._named_id("pad_token")
        named = [] if self.eos_token_id is None else [self.eos_token_id]
        self.eos_token_ids = frozenset(eos_token_ids).union(named)
        self.chat_templates = ChatTemplates(templates or {}, self.special_tokens)
        document = orjson.loads(tokenizer.to_str())
        decoder = document["decoder"]
        self._cuts = find_cuts(document)
        self._max_token_bytes = max_token_bytes(document)
        # The tokens' contributions to a text, if texts are concatenations; see `token_bytes`.
        self.concatenation: TokenBytes | None = read_token_bytes(decoder, self._vocabulary)
        table = self.concatenation.table if self.concatenation is not None else self._lone_bytes()
        self._table = table
        # The same without what special tokens look like.
        self.visible_bytes = tuple(
            b"" if token_id in self.special_ids else piece for token_id, piece in enumerate(table)
        )

    def begins_with_special_tokens(self, text: str) -> bool:
        """Whether special tokens are put around a text that a chat template has written."""
        if self.chat_templates.writes_special_tokens:
            return False
        begin = self.special_tokens.get("bos_token")
        return begin is None or not text.startswith(begin)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Tokenizer:
        """InvalidArgumentError says which file is missing or bad."""
        files = checkpoint.tokenizer
        try:
            tokenizer = tokenizers.Tokenizer.from_str(files.document)
        except BaseException as error:
            if not _is_of_library(error):
                raise
            raise InvalidArgumentError(f"{files.path} cannot be read by the library tokenizers: {error}") from error
        special = special_tokens(files.config, files.special_tokens_map)
        try:
            _add_tokens(tokenizer, files.config, special)
            return cls(
                tokenizer,
                special=special,
                eos_token_ids=checkpoint.eos_token_ids,
                templates=checkpoint.chat_templates,
            )
        except InvalidArgumentError as error:
            if str(files.path.parent) in error.message:
                raise
            raise InvalidArgumentError(f"{files.path}: {error.message}") from None

    def encode(
        self,
        text: str | bytes,
        add_special_tokens: bool = True,
        *,
        longest: int | None = None,
        check_length: LengthCheck = any_length,
    ) -> list[int]:
        """Token ids. Special tokens that are written out in the text are recognised. `bytes` are UTF-8.

        At most `longest` of them: then the end of the text is left out, and not what is added around it.
        `check_length` is called with a lower bound before a text is read, and again after each part of it.
        InvalidArgumentError: the text has half of a surrogate pair, is not UTF-8, or is too long without a place where
        it can be cut.
        """
        return self.encode_array(text, add_special_tokens, longest=longest, check_length=check_length).tolist()

    def encode_array(
        self,
        text: str | bytes,
        add_special_tokens: bool = True,
        *,
        longest: int | None = None,
        check_length: LengthCheck = any_length,
    ) -> array[int]:
        """The same with a tenth of the memory, for texts of any length."""
        with _reading():
            if longest is None:
                return self._ids(text, add_special_tokens, check_length)
            before, after = self._added if add_special_tokens else ([], [])
            most = max(0, longest - len(before) - len(after))
            inner = self._ids(text, False, partial(_check_until, most, check_length))[:most]
            return array("i", [*before, *inner, *after][:longest])

    def encode_pair(
        self, first: str, second: str, *, longest: int | None = None, longest_second: int | None = None
    ) -> tuple[list[int], list[int]]:
        """The tokens of two texts as the tokenizer joins them, and of each token to which text it belongs.

        At most `longest`: then the end of the longer text is left out, as the library does. Of the second text at most
        `longest_second`. InvalidArgumentError: a text is too long, or has half of a surrogate pair.
        """
        one, two = self._encodings(first, second)
        if longest_second is not None:
            two.truncate(longest_second)
        if longest is not None:
            most = max(0, longest - self._tokenizer.num_special_tokens_to_add(True))
            for part, size in zip((one, two), _shares(len(one), len(two), most), strict=True):
                part.truncate(size)
        joined = self._tokenizer.post_process(one, two, True)
        return joined.ids[:longest], joined.type_ids[:longest]

    def shortened(self, text: str, num_tokens: int) -> str:
        """The beginning of a text that has at most `num_tokens` tokens. InvalidArgumentError as above."""
        encoding = self._encodings(text, "")[0]
        if len(encoding) <= num_tokens:
            return text
        return text[: encoding.offsets[num_tokens - 1][1]] if num_tokens > 0 else ""

    def _encodings(self, first: str, second: str) -> Sequence[Any]:
        """Of both texts, without special tokens."""
        if max(len(first), len(second)) > _MAX_WHOLE_SIZE:
            raise InvalidArgumentError(f"the text is too long: a text of a pair may have {_MAX_WHOLE_SIZE} characters")
        with _reading():
            if max(len(first), len(second)) > LONG_TEXT:
                _start_readers()
            # Of a batch the library lets other threads run.
            found: Sequence[Any] = self._tokenizer.encode_batch([first, second], add_special_tokens=False)
        return found

    def _ids(self, text: str | bytes, add_special_tokens: bool, check_length: LengthCheck = any_length) -> array[int]:
        if len(text) <= LONG_TEXT:
            whole = text if isinstance(text, str) else str(text, "utf-8")
            ids = array("i", self._tokenizer.encode(whole, add_special_tokens=add_special_tokens).ids)
            check_length(len(ids), True)
            return ids
        if self._max_token_bytes is not None:
            with suppress(_EnoughError):
                check_length(len(text) // self._max_token_bytes, False)
        before, after = self._added if add_special_tokens else ([], [])
        ids = array("i", before)
        _start_readers()
        for part in self._parts(text):
            try:
                check_length(len(ids), False)
            except _EnoughError:
                return ids
            # Of a batch the library lets other threads run, which for one text wait as long as it takes. Two texts are
            # read by its own threads, and a single one by the caller's.
            found = self._tokenizer.encode_batch_fast([part, ""], add_special_tokens=False)[0].ids
            for start in range(0, len(found), _IDS_AT_ONCE):
                ids.extend(found[start : start + _IDS_AT_ONCE])
        ids.extend(after)
        check_length(len(ids), True)
        return ids

    def _parts(self, text: str | bytes) -> Iterator[str]:
        """The text in parts whose tokens are those of the whole. InvalidArgumentError for a part that is too long."""
        if self._cuts is None:
            if len(text) > _MAX_WHOLE_SIZE:
                raise InvalidArgumentError(
                    f"the text is too long: texts for this model's tokenizer cannot be cut, and may have "
                    f"{_MAX_WHOLE_SIZE} characters"
                )
            yield text if isinstance(text, str) else str(text, "utf-8")
            return
        rest = ""
        for piece in (text,) if isinstance(text, str) else _decoded(text):
            parts = self._cuts.split(rest + piece, _PART_SIZE, _MAX_PART_SIZE)
            rest = next(parts)
            for part in parts:
                yield rest
                rest = part
        yield rest

    @cached_property
    def _added(self) -> tuple[list[int], list[int]]:
        """The tokens added before and after every text."""
        inner, whole = (self._ids("a", add_special_tokens).tolist() for add_special_tokens in (False, True))
        num_before = next(
            (start for start in range(len(whole)) if whole[start : start + len(inner)] == inner), len(whole)
        )
        return whole[:num_before], whole[num_before + len(inner) :]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The whole text. Ids that are no token, which padded vocabularies have, give nothing."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token contributes to a text, perhaps half a character. b"" for an id without a token."""
        return self._table[token_id] if 0 <= token_id < len(self._table) else b""

    def token_text(self, token_id: int) -> str:
        """The same as text, with replacement characters for what is none."""
        return self.token_bytes(token_id).decode(errors="replace")

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    @cached_property
    def names(self) -> Array:
        """All tokens as the vocabulary writes them, by id, in UTF-8: objects, so that a long text shares them."""
        names = np.full(self.vocab_size, b"", object)
        for token, token_id in self._vocabulary.items():
            names[token_id] = token.encode(errors="replace")
        return names

    @cached_property
    def pieces(self) -> Array:
        """What each token contributes to a text, by id: objects, as `names`."""
        pieces = np.full(self.vocab_size, b"", object)
        pieces[: len(self._table)] = self._table[: self.vocab_size]
        return pieces

    def token_to_id(self, token: str) -> int | None:
        return self._vocabulary.get(token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        picture: str | None = None,
    ) -> str:
        """The text of a conversation for the model, from the template of the model's own directory.

        `variables` are what else the template may read, and `picture` is the text that stands for one.
        InvalidArgumentError: no template, a message that it refuses, a variable whose name is one of the above, or it
        takes too long or becomes too large.
        """
        return self.chat_templates.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            documents=documents,
            variables=variables,
            picture=picture,
        )

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._vocabulary.get(token)

    def _lone_bytes(self) -> tuple[bytes, ...]:
        """For a decoder that does not concatenate: each token decoded alone."""
        return tuple(self.decode([token_id], skip_special_tokens=False).encode() for token_id in range(self.vocab_size))


def _decoded(text: bytes) -> Iterator[str]:
    """UTF-8 in pieces. Raises UnicodeDecodeError."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(text), _DECODED_AT_ONCE):
        yield decoder.decode(text[start : start + _DECODED_AT_ONCE], start + _DECODED_AT_ONCE >= len(text))


class _EnoughError(Exception):
    """There are as many tokens as are wanted."""


def _shares(num_first: int, num_second: int, most: int) -> tuple[int, int]:
    """How many tokens of two texts stay if both have `most`: the longer one is cut first, then both to one length."""
    if num_first + num_second <= most:
        return num_first, num_second
    shorter = min(num_first, num_second, most // 2)
    is_first_shorter = num_first <= num_second
    return (shorter, most - shorter) if is_first_shorter else (most - shorter, shorter)


def _check_until(most: int, check_length: LengthCheck, num_tokens: int, is_all: bool) -> None:
    """End the reading of a text that may be cut once there is enough; until then `check_length` may end it."""
    check_length(min(num_tokens, most), False)
    if num_tokens >= most and not is_all:
        raise _EnoughError


def _add_tokens(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Tokens that tokenizer_config.json knows and tokenizer.json does not; named ones are special in any case."""
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    described = config.get("added_tokens_decoder") or {}
    if not isinstance(described, Mapping) or not all(token_id.isdecimal() for token_id in described):
        raise InvalidArgumentError("added_tokens_decoder of the tokenizer's config must be an object of token ids")
    for token_id, value in sorted(described.items(), key=lambda item: int(item[0])):
        if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
            raise InvalidArgumentError(f"added_tokens_decoder.{token_id} must have a text 'content', got {value!r:.80}")
        if value["content"] not in known:
            flags = {name: bool(value.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "special")}
            normalized = bool(value.get("normalized", not flags["special"]))
            tokenizer.add_tokens([tokenizers.AddedToken(value["content"], normalized=normalized, **flags)])
    for token in special.values():
        if token not in known or not known[token].special:
            tokenizer.add_special_tokens([known.get(token) or tokenizers.AddedToken(token, special=True)])
