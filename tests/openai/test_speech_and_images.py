"""Models that speak and draw, behind OpenAI's client: samples and files, pieces, drafts, and what is refused."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
from PIL import Image
from support.python_models import write_model
from support.serving import running_server

RATE = 16_000
# Each word of the text is a piece of sound, as loud as the word is long; "broken" ends it.
SPEAKER = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            given = {tensor.name(): tensor.as_numpy().reshape(-1)[0] for tensor in request.inputs()}
            sender = request.get_response_sender()
            for word in given["text_input"].decode().split():
                if word == "broken":
                    error = pb_utils.TritonError("the voice broke")
                    sender.send(pb_utils.InferenceResponse(error=error))
                    break
                size = int(1600 / given.get("speed", 1.0))
                loud = {b"loud": 1.0}.get(given.get("voice"), 0.5)
                piece = np.full(size, loud * len(word) / 10, np.float32)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("audio", piece)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
SPEAKER_CONFIG = f"""
model_transaction_policy {{ decoupled: true }}
parameters {{ key: "sample_rate" value {{ string_value: "{RATE}" }} }}
input [
  {{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "voice" data_type: TYPE_STRING dims: [ 1 ] optional: true }},
  {{ name: "speed" data_type: TYPE_FP32 dims: [ 1 ] optional: true }}
]
output [ {{ name: "audio" data_type: TYPE_FP32 dims: [ -1 ] }} ]
"""
# A picture whose red is its seed; a draft before it is black.
PAINTER = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            given = {tensor.name(): tensor.as_numpy().reshape(-1)[0] for tensor in request.inputs()}
            sender = request.get_response_sender()
            shape = (int(given.get("height", 8)), int(given.get("width", 8)), 3)
            for red in (0, given.get("seed", 100)):
                pixels = np.zeros(shape, np.uint8)
                pixels[..., 0] = red
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("image", pixels)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
PAINTER_CONFIG = """
model_transaction_policy { decoupled: true }
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "width" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
  { name: "height" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
  { name: "seed" data_type: TYPE_INT64 dims: [ 1 ] optional: true }
]
output [ { name: "image" data_type: TYPE_UINT8 dims: [ -1, -1, -1 ] } ]
"""
# Makes files of its own, in the format that is asked for.
FILES = """
import io
import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image

class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            given = {tensor.name(): tensor.as_numpy().reshape(-1)[0] for tensor in request.inputs()}
            file = io.BytesIO()
            Image.new("RGB", (4, 4), (7, 8, 9)).save(file, "PNG")
            form = given.get("response_format", b"") + b" file"
            values = {"audio": form, "image": file.getvalue()}
            tensors = [pb_utils.Tensor(name, np.array([value], object)) for name, value in values.items()]
            found.append(pb_utils.InferenceResponse(tensors))
        return found
"""
FILES_CONFIG = """
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "response_format" data_type: TYPE_STRING dims: [ 1 ] optional: true }
]
output [ { name: "audio" data_type: TYPE_STRING dims: [ 1 ] }, { name: "image" data_type: TYPE_STRING dims: [ 1 ] } ]
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("media")
    models = {
        "speaker": (SPEAKER, SPEAKER_CONFIG),
        "painter": (PAINTER, PAINTER_CONFIG),
        "files": (FILES, FILES_CONFIG),
    }
    for name, (source, config) in models.items():
        write_model(root, source, config).rename(root / name)
    with running_server(root, exit_on_error=True) as running:
        yield f"http://{running.http_url}"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as connected:
        yield connected


def speak(client: openai.OpenAI, text: str = "one four", **more: Any) -> bytes:
    return client.audio.speech.create(model="speaker", input=text, **{"voice": "calm", **more}).content


def test_speech_comes_as_the_file_that_is_asked_for(client: openai.OpenAI) -> None:
    samples = np.frombuffer(speak(client, response_format="pcm"), "<i2") / 32767
    assert samples == pytest.approx(np.repeat([0.15, 0.2], 1600), abs=1e-4)
    with wave.open(io.BytesIO(speak(client, response_format="wav"))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)
        assert np.frombuffer(file.readframes(3200), "<i2") / 32767 == pytest.approx(samples, abs=1e-4)
    for form, container in (("flac", "FLAC"), ("mp3", "MP3"), ("opus", "OGG")):
        sound = soundfile.info(io.BytesIO(speak(client, response_format=form)))
        assert (sound.format, sound.samplerate, round(sound.duration, 1)) == (container, RATE, 0.2)
    assert soundfile.info(io.BytesIO(speak(client))).format == "MP3"


def test_voice_and_speed_reach_the_model(client: openai.OpenAI) -> None:
    samples = np.frombuffer(speak(client, "one", response_format="pcm", voice="loud", speed=2.0), "<i2") / 32767
    assert samples == pytest.approx(np.full(800, 0.3), abs=1e-4)
    named: Any = {"id": "loud"}
    assert (
        speak(client, "one", response_format="pcm", voice=named, speed=2.0)
        == (samples * 32767).round().astype("<i2").tobytes()
    )


def test_speech_is_streamed_piece_by_piece(client: openai.OpenAI, url: str) -> None:
    with client.audio.speech.with_streaming_response.create(
        model="speaker", input="one four", voice="x", response_format="pcm"
    ) as answer:
        assert answer.headers["content-type"] == "audio/pcm"
        assert sum(map(len, answer.iter_bytes())) == 6400
    body = {"model": "speaker", "input": "one four", "voice": "x", "response_format": "pcm", "stream_format": "sse"}
    events = httpx.post(f"{url}/v1/audio/speech", json=body).text
    assert events.count("speech.audio.delta") == 2
    assert events.count("speech.audio.done") == 1


def test_a_voice_that_breaks_leaves_no_whole_file(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="the voice broke"):
        speak(client, "broken", response_format="pcm")
    with pytest.raises(openai.APIConnectionError):
        speak(client, "one broken", response_format="pcm")


def test_a_model_makes_files_of_its_own(client: openai.OpenAI) -> None:
    sound = client.audio.speech.create(model="files", input="one", voice="x", response_format="aac")
    assert sound.content == b"aac file"
    (picture,) = client.images.generate(model="files", prompt="one").data or ()
    file = base64.b64decode(picture.b64_json or "")
    assert Image.open(io.BytesIO(file)).getpixel((0, 0)) == (7, 8, 9)
    (other,) = client.images.generate(model="files", prompt="one", output_format="webp").data or ()
    assert Image.open(io.BytesIO(base64.b64decode(other.b64_json or ""))).format == "WEBP"


def test_pictures_have_the_size_and_seeds_that_are_asked_for(client: openai.OpenAI) -> None:
    made = client.images.generate(
        model="painter", prompt="a field", n=2, size="16x8", output_format="png", extra_body={"seed": 41}
    )
    assert (made.size, made.output_format, made.usage is None) == ("16x8", "png", False)
    found = [Image.open(io.BytesIO(base64.b64decode(each.b64_json or ""))) for each in made.data or ()]
    assert [(image.size, image.getpixel((0, 0))) for image in found] == [((16, 8), (41, 0, 0)), ((16, 8), (42, 0, 0))]
    (jpeg,) = client.images.generate(model="painter", prompt="a field", output_format="jpeg").data or ()
    assert Image.open(io.BytesIO(base64.b64decode(jpeg.b64_json or ""))).format == "JPEG"


def test_a_stream_shows_drafts(client: openai.OpenAI) -> None:
    events: list[Any] = list(client.images.generate(model="painter", prompt="a field", stream=True, partial_images=1))
    assert [event.type for event in events] == ["image_generation.partial_image", "image_generation.completed"]
    reds = [Image.open(io.BytesIO(base64.b64decode(event.b64_json))).getpixel((0, 0))[0] for event in events]  # type: ignore[index]
    assert reds == [0, 100]
    assert [event.type for event in client.images.generate(model="painter", prompt="x", stream=True)] == [
        "image_generation.completed"
    ]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("audio/speech", {"model": "speaker"}, "input"),
        ("audio/speech", {"model": "speaker", "input": " "}, "input"),
        ("audio/speech", {"model": "speaker", "input": "one", "response_format": "aac"}, "response_format"),
        ("audio/speech", {"model": "speaker", "input": "one", "speed": 9}, "speed"),
        ("audio/speech", {"model": "speaker", "input": "one", "instructions": "whisper"}, "instructions"),
        ("audio/speech", {"model": "speaker", "input": "one", "voice": {"name": "x"}}, "voice.id"),
        ("audio/speech", {"model": "painter", "input": "one"}, "model"),
        ("images/generations", {"model": "speaker", "prompt": "one"}, "model"),
        ("images/generations", {"model": "painter"}, "prompt"),
        ("images/generations", {"model": "painter", "prompt": "one", "size": "big"}, "size"),
        ("images/generations", {"model": "painter", "prompt": "one", "size": "4097x1"}, "size"),
        ("images/generations", {"model": "files", "prompt": "one", "size": "8x8"}, "size"),
        ("images/generations", {"model": "painter", "prompt": "one", "steps": 5}, "steps"),
        ("images/generations", {"model": "painter", "prompt": "one", "response_format": "url"}, "response_format"),
        ("images/generations", {"model": "painter", "prompt": "one", "n": 2, "stream": True}, "n"),
    ],
)
def test_wrong_calls_are_refused_by_the_member(url: str, path: str, body: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{url}/v1/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_clients_find_models_that_speak_and_draw(client: openai.OpenAI) -> None:
    assert {model.id for model in client.models.list().data} == {"speaker", "painter", "files"}
