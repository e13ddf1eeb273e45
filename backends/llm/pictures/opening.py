"""Opens pictures that clients send: any bytes may come, so that sizes are looked at before pixels are decoded."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from typing import TYPE_CHECKING

from modelserver.backend import InvalidArgumentError

if TYPE_CHECKING:
    from PIL.Image import Image

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
                raise InvalidArgumentError("the data: URL must end its description in ';base64,'")
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
    except Exception as error:  # PIL's readers raise whatever damaged files lead them to
        known = ", ".join(_FORMATS)
        raise InvalidArgumentError(f"the file cannot be read as a picture ({known}): {error!s:.100}") from None


def _too_large() -> InvalidArgumentError:
    return InvalidArgumentError(f"its file is larger than {MAX_BYTES >> 20} MiB")
