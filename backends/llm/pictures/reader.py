"""Pictures of requests: opened, seen and placed beside the worker's thread; what was seen is kept for a while."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING

from modelserver.backend import InvalidArgumentError

from ..options import EngineOptions
from .prompt import Picture, PromptPictures, place_pictures

if TYPE_CHECKING:
    from PIL.Image import Image

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


# Opens pictures that clients send. They may send any bytes, so sizes are checked before pixels are decoded.

# Of a picture's file. Base64 takes a third more.
MAX_BYTES = 20 << 20
# Formats without a language of their own: PIL hands others, such as EPS, to programs.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM")
# A JPEG may go over all of its pixels again and again, in scans of a few bytes each.
_START_OF_SCAN = b"\xff\xda"
_MAX_SCANS = 64


def picture_bytes(given: bytes) -> bytes:
    """The file in an element of the input `image`: itself, its base64, or a `data:` URL.

    Raises InvalidArgumentError, also for a file of more than `MAX_BYTES`.
    """
    if given.startswith(_MAGIC):
        data = given
    else:
        encoded = given
        if given[:5].lower() == b"data:":
            described, comma, encoded = given.partition(b",")
            if not comma or not described.lower().endswith(b";base64"):
                raise InvalidArgumentError("a data: URL must be in base64: 'data:image/png;base64,...'")
        if len(encoded) > MAX_BYTES * 4 // 3 + 1024:
            raise _too_large()
        try:
            data = base64.b64decode(b"".join(encoded.split()), validate=True)
        except binascii.Error:
            raise InvalidArgumentError("expected the base64 of a picture's file") from None
    if len(data) > MAX_BYTES:
        raise _too_large()
    return data


def open_picture(data: bytes, *, max_pixels: int) -> Image:
    """The first frame as RGB, turned as its EXIF says. Decodes at most `max_pixels`.

    Raises InvalidArgumentError for anything else than a picture of that size.
    """
    from PIL import Image, ImageOps

    if data.count(_START_OF_SCAN) > _MAX_SCANS and data.startswith(b"\xff\xd8"):
        raise InvalidArgumentError(f"a JPEG of more than {_MAX_SCANS} scans is not decoded")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes that are checked below
            picture = Image.open(io.BytesIO(data), formats=_FORMATS)
            width, height = picture.size
            if width * height > max_pixels:
                raise InvalidArgumentError(f"it has {width} x {height} pixels; at most {max_pixels} are decoded")
            picture.load()
            return ImageOps.exif_transpose(picture).convert("RGB")
    except InvalidArgumentError:
        raise
    except Image.DecompressionBombError:
        raise InvalidArgumentError(f"it has too many pixels; at most {max_pixels} are decoded") from None
    except Exception as error:  # PIL's readers raise all kinds of errors for damaged files
        known = ", ".join(_FORMATS)
        raise InvalidArgumentError(f"the file cannot be read as a picture ({known}): {error!s:.100}") from None


def _too_large() -> InvalidArgumentError:
    return InvalidArgumentError(f"its file is larger than {MAX_BYTES >> 20} MiB")
