"""A network that answers each text once: what encoders and classifiers have in common."""

from __future__ import annotations

import abc
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from modelserver.backend import InferResponse, InvalidArgumentError

from ..admission import check_dimensions, check_embedded_length, check_token_ids
from ..call import Call
from ..contract import Operation
from ..text.tokenizer import LengthCheck, Tokenizer, both_checks


@dataclass(frozen=True, slots=True)
class Text:
    """One that is ready to be computed. `type_ids` say which token belongs to which text of a pair."""

    call: Call
    token_ids: list[int]
    type_ids: list[int] | None = None


class TextModel(abc.ABC):
    """`operations` are those that it computes, the usual one first. `max_model_len` is the longest text, in tokens with
    the special ones. `answer` is called from one thread, `read` from several. Of texts of one batch the longest is at
    most `stretch` times as long as the shortest."""

    operations: ClassVar[tuple[Operation, ...]]
    what: ClassVar[str]  # it does, in errors

    def __init__(self, tokenizer: Tokenizer, *, max_model_len: int, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.stretch = 2.0

    @abc.abstractmethod
    def answer(self, texts: Sequence[Text]) -> list[InferResponse]:
        """The response to each text, computed in one batch."""

    def read(self, call: Call, check_left: LengthCheck) -> Text:
        """The text with its tokens. InvalidArgumentError: the network has no embedding or no position for one."""
        check_dimensions(call.dimensions)
        use = "embed" if Operation.EMBED in self.operations else "classify"
        check = partial(check_embedded_length, max_model_len=self.max_model_len, use=use)
        text = self.tokenized(call, call.longest(self.max_model_len), both_checks(check_left, check))
        check(len(text.token_ids), True)
        check_token_ids(text.token_ids, self.vocab_size)
        return text

    def tokenized(self, call: Call, longest: int | None, check: LengthCheck) -> Text:
        """The text with its tokens, at most `longest`, which need not be those of the network."""
        if call.token_ids is not None:
            check(len(call.token_ids[:longest]), True)
            return Text(call, call.token_ids[:longest].tolist())
        return Text(call, self.encoded(call, longest, check).tolist())

    def encoded(self, call: Call, longest: int | None, check: LengthCheck) -> array[int]:
        """The tokens of a text that is given as text."""
        if call.text is None:
            raise InvalidArgumentError(f"input 'messages': this model {self.what} texts; it has no chat template")
        has_special_tokens = call.has_special_tokens is not False
        text = self.prepared(call.text)
        return self.tokenizer.encode_array(text, has_special_tokens, longest=longest, check_length=check)

    def prepared(self, text: str | bytes) -> str | bytes:
        """The text as the network is to read it."""
        return text
