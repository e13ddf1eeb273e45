"""Whisper behind OpenAI's client: each format equals what transformers writes down, and bad files are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers
from modelserver_backends.transformers.sound import read_sound
from support.clients import ClientError, GrpcClient
from support.contexts import context_of, instance_of, request_of
from support.recorder import Recorder
from support.serving import RunningServer, running_server
from support.tiny_whisper import RATE, WINDOW_S, sound, sound_file, write_whisper

from modelserver.backend import ResponseSender

MAX_SECONDS = 60
_CONFIG = """
parameters {{ key: "threads" value: {{ string_value: "1" }} }}
parameters {{ key: "max_audio_seconds" value: {{ string_value: "{}" }} }}
"""
LONG = 3.5


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whisper")
    for name in ("whisper", "english"):
        write_whisper(root / name / "1", is_multilingual=name == "whisper")
        (root / name / "config.pbtxt").write_text(_CONFIG.format(MAX_SECONDS))
    return root


@pytest.fixture(scope="module")
def served(directory: Path) -> Iterator[RunningServer]:
    with running_server(directory) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{served.http_url}/v1", api_key="none", max_retries=0) as made:
        yield made


class Reference:
    """Transformers' own long-form generation."""

    def __init__(self, directory: Path) -> None:
        self.processor: Any = transformers.WhisperProcessor.from_pretrained(directory)
        self.model: Any = transformers.WhisperForConditionalGeneration.from_pretrained(directory)

    def segments(self, samples: Any, prompt: str = "", **options: Any) -> list[tuple[float, float, str]]:
        """Start, end and text of each segment, cut to the end of the sound."""
        extractor, tokenizer = self.processor.feature_extractor, self.processor.tokenizer
        length = {"truncation": False, "padding": "longest"} if len(samples) > WINDOW_S * RATE else {}
        batch = extractor(samples, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **length)
        if prompt:
            options["prompt_ids"] = self.processor.get_prompt_ids(prompt, return_tensors="pt")
        with torch.inference_mode():
            found = self.model.generate(
                batch["input_features"], attention_mask=batch["attention_mask"], return_timestamps=True,
                return_segments=True, temperature=0.0, **options,
            )  # fmt: skip
        first_time, end_s = tokenizer.convert_tokens_to_ids("<|0.00|>"), len(samples) / RATE
        return [
            (
                round(min(float(each["start"]), end_s), 2),
                round(min(float(each["end"]), end_s), 2),
                tokenizer.decode([token for token in each["tokens"].tolist() if token < first_time],
                                 skip_special_tokens=True),
            )
            for each in found["segments"][0]
        ]  # fmt: skip

    def text(self, samples: Any, **options: Any) -> str:
        return "".join(text for _, _, text in self.segments(samples, **options)).strip()


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    return Reference(directory / "whisper" / "1")


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[tuple[float, float, str]]:
    """The segments of a sound of two windows in English."""
    found = reference.segments(sound(LONG), language="en", task="transcribe")
    assert len(found) > 2
    return found


def wav(seconds: float = LONG, seed: int = 0) -> tuple[str, bytes]:
    return "sound.wav", sound_file(sound(seconds, seed), "FLAC")


def test_verbose_json_has_what_transformers_writes_down(client: openai.OpenAI, expected: Any) -> None:
    found = client.audio.transcriptions.create(
        file=wav(), model="whisper", language="en", response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert [(each.start, each.end, each.text) for each in found.segments or ()] == expected
    assert found.text == "".join(text for _, _, text in expected).strip()
    assert (found.language, found.duration) == ("english", LONG)
    assert found.usage is not None
    assert found.usage.seconds == 4
    for index, each in enumerate(found.segments or ()):
        assert (each.id, each.temperature) == (index, 0)
        assert each.tokens
        assert each.avg_logprob < 0 < each.no_speech_prob < 1
        assert each.compression_ratio > 0


def test_words_are_where_transformers_finds_them(client: openai.OpenAI, reference: Reference) -> None:
    """Of a sound of one window. The network says the same letters again and again, which are a word of each segment."""
    samples = sound(WINDOW_S - 0.1, seed=3)
    batch = reference.processor.feature_extractor(
        samples, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True
    )
    found = reference.model.generate(
        batch["input_features"], attention_mask=batch["attention_mask"], return_timestamps=True, return_segments=True,
        return_token_timestamps=True, temperature=0.0, language="en", task="transcribe",
    )  # fmt: skip
    first_time = reference.processor.tokenizer.convert_tokens_to_ids("<|0.00|>")
    expected = []
    for segment in found["segments"][0]:
        times = segment["token_timestamps"].tolist()
        text = [place for place, token in enumerate(segment["tokens"].tolist()) if token < first_time]
        expected.append([times[text[0] - 1], times[text[-1]]])
    asked: dict[str, Any] = {
        "file": ("sound.flac", sound_file(samples, "FLAC")),
        "model": "whisper",
        "language": "en",
        "response_format": "verbose_json",
    }
    answer = client.audio.transcriptions.create(**asked, timestamp_granularities=["word"])
    words = answer.words or ()
    assert [[word.start, word.end] for word in words] == [pytest.approx(times, abs=0.03) for times in expected]
    assert "".join(word.word for word in words) == answer.text.replace(" ", "")
    assert answer.segments is None
    both = client.audio.transcriptions.create(**asked, timestamp_granularities=["word", "segment"])
    assert (both.words, len(both.segments or ())) == (answer.words, len(expected))
    plain = client.audio.transcriptions.create(**asked)
    assert (plain.words, plain.text) == (None, answer.text)
    with pytest.raises(openai.BadRequestError, match="alignment_heads"):
        client.audio.transcriptions.create(**{**asked, "model": "english"}, timestamp_granularities=["word"])


def test_json_and_text(client: openai.OpenAI, expected: Any) -> None:
    text = "".join(text for _, _, text in expected).strip()
    options: dict[str, Any] = {"file": wav(), "model": "whisper", "language": "English"}
    assert client.audio.transcriptions.create(**options).text == text
    assert client.audio.transcriptions.create(**options, response_format="text") == text + "\n"


def test_subtitles(client: openai.OpenAI, expected: Any) -> None:
    options: dict[str, Any] = {"file": wav(), "model": "whisper", "language": "en"}
    srt = str(client.audio.transcriptions.create(**options, response_format="srt")).splitlines()
    start, end, text = expected[0]
    line = f"00:00:0{start:.3f} --> 00:00:0{end:.3f}"
    assert srt[:4] == ["1", line.replace(".", ","), " ".join(text.split()), ""]
    assert sum(" --> " in each for each in srt) == len(expected)
    vtt = str(client.audio.transcriptions.create(**options, response_format="vtt")).splitlines()
    assert vtt[:4] == ["WEBVTT", "", line, " ".join(text.split())]


def test_a_stream_has_a_delta_for_each_window(client: openai.OpenAI, expected: Any) -> None:
    events = list(client.audio.transcriptions.create(file=wav(), model="whisper", language="en", stream=True))
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    text = "".join(text for _, _, text in expected).strip()
    assert len(deltas) > 1
    assert "".join(deltas).strip() == text
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text == text


def test_the_language_is_found_out(client: openai.OpenAI, reference: Reference) -> None:
    samples = sound(WINDOW_S, 3)
    found = client.audio.transcriptions.create(
        file=("a.flac", sound_file(samples, "FLAC")), model="whisper", response_format="verbose_json"
    )
    assert found.text == reference.text(samples, task="transcribe")
    assert found.language in ("english", "german", "french")


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # OpenAI's client would have no more translations
def test_translations(client: openai.OpenAI, reference: Reference) -> None:
    samples = sound(WINDOW_S, 2)
    found = client.audio.translations.create(file=("a.flac", sound_file(samples, "FLAC")), model="whisper")
    assert found.text == reference.text(samples, task="translate")


def test_a_prompt_goes_before_the_text(client: openai.OpenAI, reference: Reference) -> None:
    samples, said = sound(WINDOW_S, 1), {"language": "en", "task": "transcribe"}
    assert reference.text(samples, **said) != (prompted := reference.text(samples, prompt="abc", **said))
    found = client.audio.transcriptions.create(
        file=("a.flac", sound_file(samples, "FLAC")), model="whisper", language="en", prompt="abc"
    )
    assert found.text == prompted
    # Of a prompt that is longer than the model takes, the end counts.
    long = client.audio.transcriptions.create(
        file=("a.flac", sound_file(samples, "FLAC")), model="whisper", language="en", prompt="x" * 500
    )
    assert isinstance(long.text, str)


def test_temperature_makes_other_texts(client: openai.OpenAI) -> None:
    texts = {
        client.audio.transcriptions.create(file=wav(1.0), model="whisper", language="en", temperature=1).text
        for _ in range(3)
    }
    assert len(texts) > 1


def test_requests_share_batches_and_answer_as_alone(directory: Path, reference: Reference) -> None:
    instance = instance_of("transformers", context_of(directory / "whisper"))
    sizes, write_down = [], instance._network.write_down

    def counted(recordings: list[Any]) -> None:
        sizes.append(len(recordings))
        write_down(recordings)

    instance._network.write_down = counted
    sounds = [sound(seconds, seed) for seed, seconds in enumerate((3.0, 2.0, 5.0, 4.0))]
    heard = []
    for samples in sounds:
        file, recorder = np.array([sound_file(samples, "FLAC")], object), Recorder()
        request = request_of(audio=file, language=np.array([b"en"], object))
        request.own_sender = ResponseSender(recorder)
        instance.add(request)
        heard.append((request, recorder))
    instance.abort(heard.pop()[0])
    for _, future in instance._reading.values():
        future.result()  # so that all are in the first batch
    while instance.has_work:
        instance.step()
    instance.close()
    assert sizes[0] == 3
    for samples, (_, recorder) in zip(sounds, heard, strict=False):
        (response,) = recorder.responses
        text = next(tensor.data[0] for tensor in response.outputs if tensor.name == "text")
        assert text.decode().strip() == reference.text(samples, language="en", task="transcribe")


@pytest.mark.parametrize(("kind", "rate", "channels"), [("WAV", 44_100, 2), ("OGG", 48_000, 1), ("MP3", 22_050, 2)])
def test_other_kinds_of_files_are_resampled(kind: str, rate: int, channels: int) -> None:
    times = np.arange(rate) / rate
    tone = np.sin(2 * np.pi * 440 * times).astype(np.float32) * 0.5
    found = read_sound(sound_file(np.stack([tone] * channels, axis=1), kind, rate), RATE, 10)
    assert found.dtype == np.float32
    assert abs(len(found) - RATE) < RATE * 0.1
    middle = found[RATE // 4 : 3 * RATE // 4]
    assert np.abs(np.fft.rfft(middle)).argmax() * RATE / len(middle) == pytest.approx(440, abs=3)
    assert np.abs(middle).max() == pytest.approx(0.5, abs=0.1)


def _bad(kind: str) -> bytes:
    if kind == "foreign":
        return b"%PDF-1.7"
    if kind == "broken":
        return b"RIFF" + bytes(100)
    if kind == "empty":
        return b""
    if kind == "silent":
        return sound_file(np.zeros(0, np.float32))
    if kind == "slow":
        return sound_file(np.zeros(10, np.float32), rate=10)
    return sound_file(np.zeros(RATE * (MAX_SECONDS + 1), np.float32))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("foreign", r"expected a file of sound \(WAV, FLAC, Ogg or MP3\)"),
        ("broken", "the file of sound cannot be read"),
        ("empty", "'file' is empty"),
        ("silent", "the file has no sound"),
        ("slow", "10 samples per second, expected from 1000"),
        ("long", f"longer than {MAX_SECONDS} seconds"),
    ],
)
def test_bad_files(client: openai.OpenAI, kind: str, reason: str) -> None:
    with pytest.raises(openai.BadRequestError, match=reason) as refused:
        client.audio.transcriptions.create(file=("a.wav", _bad(kind)), model="whisper")
    assert refused.value.param == "file"


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"language": "tlh"}, "language", "expected one of de, en, fr"),
        ({"response_format": "diarized_json"}, "response_format", "must be one of json, text"),
        ({"temperature": 2}, "temperature", "at most 1"),
        ({"temperature": "hot"}, "temperature", "must be a number"),
        ({"stream": "maybe"}, "stream", "true or false"),
        ({"stream": "true", "response_format": "srt"}, "response_format", "a stream has no"),
        ({"timestamp_granularities[]": "token"}, "timestamp_granularities", "must be segment or word, got 'token'"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities", "needs the response_format"),
        ({"include[]": "logprobs"}, "include", "not supported"),
        ({"prompt": "x" * 20_000}, "prompt", "at most 16384"),
        ({"prompt": "a<|en|>"}, "prompt", "input 'prompt'"),
        ({"model": "nothing"}, "model", "does not exist"),
    ],
)
def test_bad_fields(served: RunningServer, fields: dict[str, Any], param: str, reason: str) -> None:
    url = f"http://{served.http_url}/v1/audio/transcriptions"
    answer = httpx.post(url, data={"model": "whisper", **fields}, files={"file": wav(0.5)})
    assert answer.status_code == (404 if param == "model" else 400)
    assert answer.json()["error"]["param"] == param
    assert reason in answer.json()["error"]["message"]


def test_forms_without_a_file_and_other_bodies(served: RunningServer) -> None:
    url = f"http://{served.http_url}/v1/audio/translations"
    answer = httpx.post(url, data={"model": "whisper"}, files={"other": b"x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "missing_required_parameter")
    answer = httpx.post(url, json={"model": "whisper"})
    assert answer.status_code == 400
    assert "multipart/form-data" in answer.json()["error"]["message"]


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
def test_models_of_other_kinds(client: openai.OpenAI, llm_server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="this model knows English only, it does not translate"):
        client.audio.translations.create(file=wav(0.5), model="english")
    with pytest.raises(openai.BadRequestError, match="the model 'whisper' does not generate text"):
        client.completions.create(model="whisper", prompt="a")
    with (
        openai.OpenAI(base_url=f"http://{llm_server.http_url}/v1", api_key="none", max_retries=0) as other,
        pytest.raises(openai.BadRequestError, match="the model 'mock' does not write sound down"),
    ):
        other.audio.transcriptions.create(file=wav(0.5), model="mock")


def test_a_model_that_knows_english_only(client: openai.OpenAI, directory: Path) -> None:
    samples = sound(WINDOW_S, 4)
    found = client.audio.transcriptions.create(
        file=("a.flac", sound_file(samples, "FLAC")), model="english", response_format="verbose_json"
    )
    assert found.text == Reference(directory / "english" / "1").text(samples)
    assert found.language == "english"


def test_tensors(served: RunningServer, expected: Any) -> None:
    with GrpcClient(served) as grpc:
        file = np.array([wav()[1]], object)
        answer = grpc.infer("whisper", {"audio": file, "language": np.array([b"en"], object)})
        assert answer["segment_text"].tolist() == [text.encode() for _, _, text in expected]
        np.testing.assert_allclose(answer["segment_start"], [start for start, _, _ in expected], atol=0.006)
        with pytest.raises(ClientError, match="input 'task': expected one of transcribe, translate"):
            grpc.infer("whisper", {"audio": file, "task": np.array([b"sing"], object)})
