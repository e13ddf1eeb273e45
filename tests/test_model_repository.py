"""The example models: what the repository holds, and that pictures are read from end to end."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from support.contexts import context_of, instance_of, request_of

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "images"


def files(repository: Path) -> list[Path]:
    return [path for path in repository.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def test_it_holds_nothing_but_models(model_repository: Path) -> None:
    for path in model_repository.iterdir():
        assert (path / "config.pbtxt").is_file()
        assert any(version.name.isdecimal() for version in path.iterdir())


def test_all_weights_together_are_small(model_repository: Path) -> None:
    assert sum(path.stat().st_size for path in files(model_repository)) < 6_000_000


def test_the_language_model_is_small(model_repository: Path) -> None:
    assert sum(path.stat().st_size for path in files(model_repository / "tiny_chat")) < 5_000_000


def test_no_file_tells_where_it_was_made(model_repository: Path) -> None:
    for path in files(model_repository):
        contents = [path.read_bytes()]
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                contents += [archive.read(name) for name in archive.namelist()]
        assert not any(str(ROOT).encode() in content or b"site-packages" in content for content in contents), path


@pytest.fixture(scope="module")
def preprocess(model_repository: Path) -> Any:
    instance = instance_of("python", context_of(model_repository / "digits_preprocess"))
    yield instance
    instance.close()


def picture_request(*pictures: bytes) -> Any:
    return request_of(picture=np.array([[picture] for picture in pictures], dtype=object))


def test_every_picture_is_read(model_repository: Path, preprocess: Any) -> None:
    pictures = [(PICTURES / f"digit-{digit}.png").read_bytes() for digit in range(10)]
    (response,) = preprocess.execute([picture_request(*pictures)])
    assert response.error is None
    digits = instance_of("onnxruntime", context_of(model_repository / "digits_onnx"))
    images = response.outputs[0].data
    assert (images.dtype, images.shape) == (np.float32, (10, 8, 8))
    assert digits.run({"image": images})["digit"][:, 0].tolist() == list(range(10))


def test_size_and_colour_of_a_picture_do_not_matter(preprocess: Any) -> None:
    scanned = Image.open(PICTURES / "digit-7-8x8.png")
    on_white = io.BytesIO()
    ImageOps.invert(scanned).convert("RGB").save(on_white, "PNG")
    first, second = preprocess.execute(
        [picture_request((PICTURES / "digit-7.png").read_bytes()), picture_request(on_white.getvalue())]
    )
    assert np.allclose(first.outputs[0].data, second.outputs[0].data, atol=1 / 255)


def test_what_is_no_picture_fails_alone(preprocess: Any) -> None:
    good = (PICTURES / "digit-7.png").read_bytes()
    bad, fine = preprocess.execute([picture_request(b"GIF89a"), picture_request(good)])
    error = getattr(bad, "error", None) or bad
    assert "cannot decode 6 bytes as a PNG or JPEG picture: it is neither" in str(error)
    assert fine.error is None


def test_add_sub_adds_and_subtracts(model_repository: Path) -> None:
    instance = instance_of("python", context_of(model_repository / "add_sub"))
    try:
        left, right = np.array([4, 3, 2, 1], np.float32), np.ones(4, np.float32)
        (response,) = instance.execute([request_of(INPUT0=left, INPUT1=right)])
        outputs = {tensor.name: tensor.data.tolist() for tensor in response.outputs}
    finally:
        instance.close()
    assert outputs == {"OUTPUT0": [5, 4, 3, 2], "OUTPUT1": [3, 2, 1, 0]}
