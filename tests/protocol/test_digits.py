"""The example models, asked as a user would: real pictures in, digits out, accuracy on what they never saw."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.clients import ProtocolClient

from training import digits

pytestmark = pytest.mark.one_layout

PICTURES = Path(__file__).parents[2] / "docs" / "images"
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def pictures(images: np.ndarray) -> np.ndarray:
    """PNG files [n, 1] of images [n, 8, 8], as a scanner would make them."""
    files = []
    for pixels in np.rint(images * 255).astype(np.uint8):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        files.append(file.getvalue())
    return np.array(files, dtype=object)[:, np.newaxis]


@pytest.mark.parametrize(
    ("model", "output"),
    [
        ("digits_onnx", "probabilities"),
        ("digits_int8", "probabilities"),
        ("digits_torchscript", "probabilities__0"),
        ("digits_export", "probabilities"),
    ],
)
def test_held_out_digits_are_read(client: ProtocolClient, model: str, output: str) -> None:
    images, labels = digits.held_out()
    answers = [
        client.infer(model, {"image": images[start : start + 50]}, [output])[output].argmax(axis=1)
        for start in range(0, len(images), 50)
    ]
    assert (np.concatenate(answers) == labels).mean() >= 0.97


@pytest.mark.parametrize("digit", range(10))
def test_a_picture_of_a_digit_is_read(client: ProtocolClient, digit: int) -> None:
    picture = np.array([[(PICTURES / f"digit-{digit}.png").read_bytes()]], dtype=object)
    image = client.infer("digits_preprocess", {"picture": picture})["image"]
    assert client.infer("digits_onnx", {"image": image}, ["digit"])["digit"].item() == digit


def test_the_pipeline_reads_held_out_pictures(client: ProtocolClient) -> None:
    images, labels = digits.held_out()
    answers = [
        client.infer("digits_pipeline", {"picture": pictures(images[start : start + 40])})["label"]
        for start in range(0, len(images), 40)
    ]
    read = [WORDS.index(word.decode()) for word in np.concatenate(answers)[:, 0]]
    assert (np.array(read) == labels).mean() >= 0.97


def test_the_pipeline_says_which_step_a_broken_picture_stops_at(client: ProtocolClient) -> None:
    with pytest.raises(
        Exception,
        match=r"(?s)in ensemble 'digits_pipeline', cannot.*; failed at step\[0\] \(model 'digits_preprocess'\)",
    ):
        client.infer("digits_pipeline", {"picture": np.array([[b"not a picture"]], dtype=object)})


def test_one_broken_picture_fails_alone(client: ProtocolClient) -> None:
    with pytest.raises(Exception, match=r"picture|image|decode"):
        client.infer("digits_preprocess", {"picture": np.array([[b"not a picture"]], dtype=object)})
    picture = np.array([[(PICTURES / "digit-4.png").read_bytes()]], dtype=object)
    assert client.infer("digits_preprocess", {"picture": picture})["image"].shape == (1, 8, 8)


@pytest.mark.parametrize(
    ("model", "served"),
    [
        ("digits_versions", ["2", "3"]),
        ("digits_versions_all", ["1", "2", "3"]),
        ("digits_versions_specific", ["1", "3"]),
    ],
)
def test_version_policies_decide_what_is_served(client: ProtocolClient, model: str, served: list[str]) -> None:
    assert sorted(client.model_metadata(model)["versions"]) == served
    images, _ = digits.held_out()
    for version in served:
        answer = client.infer(model, {"image": images[:4]}, version=version)
        assert answer.model_version == version
    newest = client.infer(model, {"image": images[:4]})
    assert newest.model_version == served[-1]
