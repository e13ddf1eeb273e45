"""Files that claim to be pictures: their formats, forms and sizes."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import pytest
from modelserver_backends.llm.pictures.reader import MAX_BYTES, open_picture, picture_bytes
from PIL import Image
from support.tiny_pictures import draw_picture

from modelserver.errors import InvalidArgumentError

PNG = draw_picture()
PIXELS = 1 << 20


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def claiming(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it has this size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pixels = zlib.compress(b"\0" * 100)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "given",
    [
        PNG,
        base64.b64encode(PNG),
        base64.encodebytes(PNG),
        b"data:image/png;base64," + base64.b64encode(PNG),
        b"DATA:;base64," + base64.b64encode(PNG),
    ],
)
def test_files_base64_and_data_urls(given: bytes) -> None:
    assert picture_bytes(given) == PNG


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"data:image/png," + PNG, "must be in base64"),
        (b"data:image/png;base64", "must be in base64"),
        (b"https://example.com/a.png", "expected the base64"),
        (b"%%%", "expected the base64"),
        (b"\x89PNG" + bytes(MAX_BYTES), "larger than 20 MiB"),
        (base64.b64encode(bytes(MAX_BYTES + 3000)), "larger than 20 MiB"),
    ],
)
def test_what_is_no_file(given: bytes, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        picture_bytes(given)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats(form: str) -> None:
    with Image.open(io.BytesIO(PNG)) as drawn:
        data = saved(drawn, form)
    opened = open_picture(data, max_pixels=PIXELS)
    assert (opened.mode, opened.size) == ("RGB", (40, 30))


def test_the_first_frame_upright_and_without_transparency() -> None:
    frames = [Image.new("RGB", (4, 2), colour) for colour in ("red", "blue")]
    opened = open_picture(saved(frames[0], "GIF", save_all=True, append_images=frames[1:]), max_pixels=PIXELS)
    assert opened.getpixel((0, 0)) == (255, 0, 0)
    turned = Image.Exif()
    turned[0x0112] = 6
    assert open_picture(saved(frames[0], "JPEG", exif=turned), max_pixels=PIXELS).size == (2, 4)
    assert open_picture(saved(Image.new("RGBA", (3, 3)), "PNG"), max_pixels=PIXELS).mode == "RGB"


@pytest.mark.parametrize("size", [(60_000, 60_000), (1, PIXELS + 1), (2**31 - 1, 2**31 - 1)])
def test_a_size_that_is_only_claimed_is_refused_before_anything_is_decoded(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidArgumentError, match="pixels"):
        open_picture(claiming(*size), max_pixels=PIXELS)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
        PNG[:60],
        b"\xff\xd8\xff\xe0 cut",
        claiming(100, 100),
        saved(Image.new("RGB", (4, 4)), "TIFF"),
    ],
)
def test_damaged_files_and_other_formats(data: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be read as a picture"):
        open_picture(data, max_pixels=PIXELS)


def test_a_jpeg_of_too_many_scans() -> None:
    data = saved(Image.new("RGB", (8, 8)), "JPEG", progressive=True)
    place = data.index(b"\xff\xda")
    with pytest.raises(InvalidArgumentError, match="more than 64 scans"):
        open_picture(data[:place] + b"\xff\xda\0\0" * 65 + data[place:], max_pixels=PIXELS)
