"""Pictures of requests: opened, seen and placed beside the worker's thread; what was seen is kept for a while."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING

from modelserver.backend import InvalidArgumentError

from ..options import EngineOptions
from .opening import open_picture, picture_bytes
from .prompt import Picture, PromptPictures, place_pictures

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer
    from .tower import Tower

# Stands for a picture in the text of any model, as llama.cpp's clients write it.
MARK = "<__media__>"


class PictureReader:
    """Called from any thread. One picture is seen at a time, and equal ones once, as long as they are kept.

    `most` pictures may be in a prompt. `placeholder` is the text that stands for one of them, before `expand`.
    """

    def __init__(self, tower: Tower, tokenizer: Tokenizer, options: EngineOptions) -> None:
        """Raises InvalidArgumentError for a tokenizer that lacks the tokens of pictures, and for steps too small."""
        self.most = options.limit_mm_per_prompt
        self._max_pixels = options.max_image_pixels
        self._tower = tower
        self._family = tower.family(tower.entries, tokenizer)
        if options.max_num_batched_tokens < options.max_num_seqs + self._family.longest_run:
            raise InvalidArgumentError(
                f"max_num_batched_tokens {options.max_num_batched_tokens} is too small: a step must have room for "
                f"a token of each of max_num_seqs ({options.max_num_seqs}) sequences and for the "
                f"{self._family.longest_run} tokens of a picture"
            )
        self._seeing = Lock()
        self._kept = _Kept(int(options.mm_processor_cache_gb * 2**30))

    @property
    def placeholder(self) -> str:
        return self._family.placeholder

    def see(self, given: Sequence[bytes], check_left: Callable[[], None]) -> list[Picture]:
        """The pictures of one request: files, base64 or data: URLs. `check_left` is called before each, and may raise.

        Raises InvalidArgumentError that names the input and the number of the picture.
        """
        if len(given) > self.most:
            raise InvalidArgumentError(
                f"input 'image' has {len(given)} pictures; this model takes at most {self.most} in a prompt "
                "(its option limit_mm_per_prompt)"
            )
        found = []
        for number, each in enumerate(given):
            check_left()
            try:
                found.append(self._see(picture_bytes(each)))
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"input 'image': picture {number}: {error.message}") from None
        return found

    def _see(self, data: bytes) -> Picture:
        digest = hashlib.blake2b(data, digest_size=32, person=b"llm picture").digest()
        if (kept := self._kept.find(digest)) is not None:
            return kept
        with self._seeing:
            if (kept := self._kept.find(digest)) is not None:  # seen while this thread waited
                return kept
            image = open_picture(data, max_pixels=self._max_pixels)
            picture = self._tower.see(image, digest, self._family)
            self._kept.keep(picture)
        return picture

    def expand(self, text: str, pictures: Sequence[Picture]) -> str:
        """The text with each placeholder or mark replaced. Raises InvalidArgumentError for more or fewer of them."""
        parts = text.replace(MARK, self._family.in_text).split(self.placeholder)
        if len(parts) - 1 != len(pictures):
            raise InvalidArgumentError(
                f"input 'image' has {len(pictures)} pictures, and the prompt has {len(parts) - 1} places for them "
                f"({self.placeholder} or {MARK})"
            )
        pieces = [parts[0]]
        for picture, part in zip(pictures, parts[1:], strict=True):
            pieces += (picture.expansion, part)
        return "".join(pieces)

    def place(self, pictures: Sequence[Picture], token_ids: Sequence[int]) -> PromptPictures:
        """Find the rows of pictures among the tokens of an expanded text.

        Raises InvalidArgumentError where the text has further tokens of that kind.
        """
        placed = place_pictures(pictures, token_ids, self._family.token_id, sees_whole=self._family.sees_whole)
        if placed is None:
            raise InvalidArgumentError(
                f"input 'image': the prompt itself has tokens that stand for pictures ({self._family.token})"
            )
        return placed


class _Kept:
    """Pictures by digest, up to a number of bytes; the longest unused goes first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._pictures: OrderedDict[bytes, Picture] = OrderedDict()
        self._lock = Lock()

    def find(self, digest: bytes) -> Picture | None:
        with self._lock:
            picture = self._pictures.get(digest)
            if picture is not None:
                self._pictures.move_to_end(digest)
            return picture

    def keep(self, picture: Picture) -> None:
        with self._lock:
            self._pictures[picture.digest] = picture
            self._num_bytes += picture.num_bytes
            while self._num_bytes > self._max_bytes:
                _, dropped = self._pictures.popitem(last=False)
                self._num_bytes -= dropped.num_bytes
