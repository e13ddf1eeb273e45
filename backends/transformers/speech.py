"""Whisper: files of sound in; text, and segments with their times, out. Windows of several requests share a batch."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from modelserver.backend import (
    Array,
    BackendContext,
    ConfigError,
    Datatype,
    InferRequest,
    InferResponse,
    InternalError,
    InvalidArgumentError,
    ModelConfig,
    ModelInput,
    ModelOutput,
    ModelTransactionPolicy,
    ResponseSender,
    ServerError,
    StepInstance,
    Tensor,
)

from .sound import LIBRARIES, read_sound
from .tasks import load_network

logger = logging.getLogger(__name__)

ARCHITECTURE = "WhisperForConditionalGeneration"
TASK = "speech-to-text"
_TASKS = ("transcribe", "translate")
# Inputs beside the file, which requests may leave out.
_OPTIONAL = {
    "language": Datatype.BYTES,
    "task": Datatype.BYTES,
    "prompt": Datatype.BYTES,
    "temperature": Datatype.FP32,
    "stream": Datatype.BOOL,
    "word_timestamps": Datatype.BOOL,
}
# Those of segments and words have an element for each; tokens are a JSON array.
_OUTPUTS = {
    "text": Datatype.BYTES,
    "language": Datatype.BYTES,
    "duration": Datatype.FP32,
    "segment_text": Datatype.BYTES,
    "segment_start": Datatype.FP32,
    "segment_end": Datatype.FP32,
    "segment_seek": Datatype.INT32,
    "segment_tokens": Datatype.BYTES,
    "segment_avg_logprob": Datatype.FP32,
    "segment_no_speech_prob": Datatype.FP32,
    "word_text": Datatype.BYTES,
    "word_start": Datatype.FP32,
    "word_end": Datatype.FP32,
}
_MAX_WINDOWS, _MAX_SECONDS = 8, 1800.0
# How long an instance that has nothing else to do waits for a file, before it looks for other requests again.
_IDLE_S = 0.02


def complete_config(context: BackendContext) -> ModelConfig:
    """The config with the tensors of this task; the model is decoupled, and forms its batches itself.

    Raises ConfigError for a config that has tensors of its own, or batches.
    """
    config = context.config
    if config.input or config.output or config.max_batch_size:
        raise ConfigError(
            f"model '{context.model_name}': expected no input, output and max_batch_size: the task {TASK} has its own "
            "tensors, and forms batches step by step; bound them with the parameter max_windows"
        )
    return replace(
        config,
        input=(
            ModelInput("audio", Datatype.BYTES, dims=(1,)),
            *(ModelInput(name, datatype, dims=(1,), optional=True) for name, datatype in _OPTIONAL.items()),
        ),
        output=tuple(ModelOutput(name, datatype, dims=(-1,)) for name, datatype in _OUTPUTS.items()),
        model_transaction_policy=ModelTransactionPolicy(decoupled=True),
    )


@dataclass(frozen=True, slots=True)
class _Mode:
    """What all windows of a batch have in common."""

    task: str
    prompt: str
    temperature: float
    has_words: bool


@dataclass(frozen=True, slots=True)
class _Word:
    """`start` and `end` in seconds of the file."""

    text: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class _Segment:
    """`start` and `end` in seconds of the file; `seek` is where its window begins, in frames of 10 ms.

    There are `words` where they are asked for.
    """

    text: str
    start: float
    end: float
    seek: int
    tokens: list[int]
    avg_logprob: float
    no_speech_prob: float
    words: tuple[_Word, ...]


@dataclass(slots=True, eq=False)
class _Recording:
    """A file that is being written down. `frames` are float32 [mel bands, frames of 10 ms]."""

    sender: ResponseSender
    mode: _Mode
    language: str | None
    is_streamed: bool
    frames: Array
    num_frames: int
    seconds: float
    seek: int = 0
    segments: list[_Segment] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return self.seek >= self.num_frames

    def response(self, language: str) -> InferResponse:
        """What the segments say that were not sent yet; `language` is the name of the language."""
        segments, self.segments = self.segments, []
        words = [word for each in segments for word in each.words]
        values: dict[str, list[Any]] = {
            "text": ["".join(each.text for each in segments).encode()],
            "language": [language.encode()],
            "duration": [self.seconds],
            "segment_text": [each.text.encode() for each in segments],
            "segment_start": [each.start for each in segments],
            "segment_end": [each.end for each in segments],
            "segment_seek": [each.seek for each in segments],
            "segment_tokens": [json.dumps(each.tokens).encode() for each in segments],
            "segment_avg_logprob": [each.avg_logprob for each in segments],
            "segment_no_speech_prob": [each.no_speech_prob for each in segments],
            "word_text": [word.text.encode() for word in words],
            "word_start": [word.start for word in words],
            "word_end": [word.end for word in words],
        }
        types = {name: object if datatype is Datatype.BYTES else datatype.numpy for name, datatype in _OUTPUTS.items()}
        return InferResponse(
            [Tensor(name, datatype, np.array(values[name], types[name])) for name, datatype in _OUTPUTS.items()]
        )


def _text(values: Mapping[str, Any], name: str) -> str:
    found: bytes = values.get(name, b"")
    return found.decode("utf-8", "replace").strip()


class SpeechInstance(StepInstance):
    """A network of Whisper's kind. Files are read on a thread of its own; each step writes down a window of each."""

    def __init__(self, context: BackendContext, device: str) -> None:
        for library in LIBRARIES:
            importlib.import_module(library)
        self._network = Whisper(context, device)
        self._max_windows = max(1, context.int_parameter("max_windows", _MAX_WINDOWS))
        self._max_seconds = context.float_parameter("max_audio_seconds", _MAX_SECONDS)
        self._num_threads = context.int_parameter("threads")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="sound")
        self._reading: dict[InferRequest, tuple[ResponseSender, Future[_Recording]]] = {}
        self._active: dict[InferRequest, _Recording] = {}

    def add(self, request: InferRequest) -> None:
        values = {name: tensor.data.reshape(-1)[0] for name, tensor in request.inputs.items() if tensor.data.size}
        if "audio" not in values:
            raise InvalidArgumentError("input 'audio' is empty")
        mode = _Mode(
            _text(values, "task") or _TASKS[0],
            _text(values, "prompt"),
            float(values.get("temperature", 0.0)),
            bool(values.get("word_timestamps", False)),
        )
        if mode.task not in _TASKS:
            raise InvalidArgumentError(f"input 'task': expected one of {', '.join(_TASKS)}, got '{mode.task:.60}'")
        if not 0 <= mode.temperature <= 1:
            raise InvalidArgumentError(f"input 'temperature': expected from 0 to 1, got {mode.temperature:g}")
        if mode.has_words and not self._network.aligns:
            raise InvalidArgumentError(
                "input 'word_timestamps': the generation_config.json of this model names no alignment_heads, by which "
                "words are found in the sound"
            )
        language = self._network.language(_text(values, "language"), mode.task)
        self._network.prompt_ids(mode.prompt)  # refuses what cannot be a prompt
        sender, is_streamed = request.sender, bool(values.get("stream", False))

        def read() -> _Recording:
            samples = read_sound(values["audio"], self._network.rate, self._max_seconds)
            frames, num_frames = self._network.frames(samples)
            seconds = len(samples) / self._network.rate
            return _Recording(sender, mode, language, is_streamed, frames, num_frames, seconds)

        self._reading[request] = (sender, self._reader.submit(read))

    def abort(self, request: InferRequest) -> None:
        reading = self._reading.pop(request, None)
        if reading is not None:
            reading[1].cancel()
        self._active.pop(request, None)

    @property
    def has_work(self) -> bool:
        return bool(self._active or self._reading)

    @property
    def has_room(self) -> bool:
        return len(self._active) + len(self._reading) < 2 * self._max_windows

    def step(self) -> None:
        if self._num_threads:
            self._network.torch.set_num_threads(self._num_threads)
            self._num_threads = 0  # it holds for the thread that calls
        self._take_read()
        if not self._active:
            return
        # The file that waits longest has a window in the batch; those of the same mode join it.
        first = next(iter(self._active.values()))
        chosen = [request for request, each in self._active.items() if each.mode == first.mode][: self._max_windows]
        recordings = [self._active.pop(request) for request in chosen]
        try:
            self._network.write_down(recordings)
        except Exception as error:
            logger.exception("a batch of %d windows of sound failed", len(recordings))
            for each in recordings:
                each.sender.finish(InternalError(f"the model failed: {type(error).__name__}: {error}"))
            return
        for request, each in zip(chosen, recordings, strict=True):
            name = self._network.names.get(each.language, "english")
            if each.is_finished:
                each.sender.finish(each.response(name))
                continue
            self._active[request] = each  # behind those that wait
            if each.is_streamed:
                each.sender.send(each.response(name), wait=False)

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)

    def _take_read(self) -> None:
        """Begin with the files that have been read; refuse those that cannot be."""
        if self._reading and not self._active:
            wait([future for _, future in self._reading.values()], _IDLE_S, FIRST_COMPLETED)
        for request in [request for request, (_, future) in self._reading.items() if future.done()]:
            sender, future = self._reading.pop(request)
            try:
                self._active[request] = future.result()
            except ServerError as error:
                sender.finish(error)
            except Exception as error:
                logger.exception("a file of sound could not be read")
                sender.finish(InternalError(f"the sound cannot be read: {type(error).__name__}: {error}"))


class Whisper:
    """The network with its processor."""

    def __init__(self, context: BackendContext, device: str) -> None:
        self.torch, self._processor, self._model = load_network(
            context, device, "WhisperForConditionalGeneration", "WhisperProcessor"
        )
        if device == "cpu":
            self._model.float()
        self._outputs_of: Any = importlib.import_module("transformers.modeling_outputs").BaseModelOutput
        tokenizer, settings = self._processor.tokenizer, self._model.generation_config
        # Checkpoints that were trained further often lack it.
        if getattr(settings, "no_timestamps_token_id", None) is None:
            settings.no_timestamps_token_id = tokenizer.convert_tokens_to_ids("<|notimestamps|>")
        self._first_time: int = settings.no_timestamps_token_id + 1
        self._no_speech: int = settings.no_timestamps_token_id - 1
        words: Any = importlib.import_module("transformers.models.whisper.tokenization_whisper")
        self._split: Any = words._combine_tokens_into_words
        # Whether words can be found in the sound.
        self.aligns = bool(getattr(settings, "alignment_heads", None))
        # English names of languages by their codes; and codes by names, several of which may mean one.
        self.names: dict[str | None, str] = words.LANGUAGES
        self._codes: dict[str, str] = words.TO_LANGUAGE_CODE
        known = getattr(settings, "lang_to_id", None) or {}
        self._languages: dict[str, int] = known if getattr(settings, "is_multilingual", True) else {}
        config = self._model.config
        self._stride = self._extractor.nb_max_frames // config.max_source_positions
        self._max_prompt = config.max_target_positions // 2 - 1

    @property
    def _extractor(self) -> Any:
        return self._processor.feature_extractor

    @property
    def rate(self) -> int:
        """Samples per second that the network reads."""
        found: int = self._extractor.sampling_rate
        return found

    def language(self, text: str, task: str) -> str | None:
        """The code of a language that is given by its code or its English name; None to find it out.

        Raises InvalidArgumentError for one that the model does not know, or a task that it cannot do.
        """
        if not self._languages:
            if task != _TASKS[0]:
                raise InvalidArgumentError("input 'task': this model knows English only, it does not translate")
            if text.lower() not in ("", "en", "english"):
                raise InvalidArgumentError(f"input 'language': this model knows English only, got '{text:.60}'")
            return "en"
        if not text:
            return None
        code = self._codes.get(text.lower(), text.lower())
        if f"<|{code}|>" not in self._languages:
            known = ", ".join(each.strip("<|>") for each in self._languages)
            raise InvalidArgumentError(f"input 'language': expected one of {known}, got '{text:.60}'")
        return str(code)

    def prompt_ids(self, prompt: str) -> Any:
        """The tokens before those of the text; of a long prompt its end counts. None for an empty prompt."""
        if not prompt.strip():
            return None
        try:
            ids = self._processor.get_prompt_ids(prompt, return_tensors="np")
        except ValueError as error:
            raise InvalidArgumentError(f"input 'prompt': {error}") from error
        kept = np.concatenate([ids[:1], ids[1:][-(self._max_prompt - 1) :]])
        return self.torch.tensor(kept, device=self._model.device)

    def frames(self, samples: Array) -> tuple[Array, int]:
        """Float32 [mel bands, frames], at least a window, and the number of frames that have sound."""
        extractor = self._extractor
        options = {} if len(samples) <= extractor.n_samples else {"truncation": False, "padding": "longest"}
        found = extractor(samples, sampling_rate=self.rate, return_tensors="np", **options)["input_features"][0]
        return found, min(found.shape[1], -(-len(samples) // extractor.hop_length))

    def write_down(self, recordings: list[_Recording]) -> None:
        """The next window of each: adds its segments, and moves on to the window after it."""
        torch, model, mode = self.torch, self._model, recordings[0].mode
        with torch.inference_mode():
            windows = torch.from_numpy(np.stack([self._window(each) for each in recordings]))
            hidden = model.get_encoder()(windows.to(model.device, model.dtype))[0]
            encoded = self._outputs_of(last_hidden_state=hidden)
            start = torch.full((len(recordings), 1), model.generation_config.decoder_start_token_id)
            logits = model(encoder_outputs=encoded, decoder_input_ids=start.to(model.device)).logits[:, -1].float()
            no_speech = logits.softmax(-1)[:, self._no_speech].tolist()
            options: dict[str, Any] = {}
            if self._languages:
                for each, row in zip(recordings, logits, strict=True):
                    each.language = each.language or self._likeliest(row)
                options = {"language": [each.language for each in recordings], "task": mode.task}
            scores = _Scores(torch, model.generation_config.eos_token_id)
            if mode.has_words:
                options["return_token_timestamps"] = True
            # Words need the attention of every head, for which transformers changes how all calls compute it.
            attention = model.config._attn_implementation
            try:
                found = model.generate(
                    encoder_outputs=encoded, return_timestamps=True, return_segments=True,
                    force_unique_generate_call=True, prompt_ids=self.prompt_ids(mode.prompt),
                    prompt_condition_type="first-segment", temperature=mode.temperature, logits_processor=[scores],
                    attention_mask=self._mask(recordings), **options,
                )  # fmt: skip
            finally:
                model.config._attn_implementation = attention
            averages = scores.averages()
        for each, segments, quiet, average in zip(recordings, found["segments"], no_speech, averages, strict=True):
            self._move_on(each, segments, quiet, average)

    def _window(self, each: _Recording) -> Array:
        length = self._extractor.nb_max_frames
        found = each.frames[:, each.seek : each.seek + length]
        return np.pad(found, ((0, 0), (0, length - found.shape[1])))

    def _mask(self, recordings: list[_Recording]) -> Any:
        """Which frames of the windows are sound, where words are to be found in it; else all."""
        length = self._extractor.nb_max_frames
        ends = [each.num_frames - each.seek if each.mode.has_words else length for each in recordings]
        return (self.torch.arange(length) < self.torch.tensor(ends)[:, None]).long().to(self._model.device)

    def _likeliest(self, logits: Any) -> str:
        """The code of the language that the network hears."""
        return max(self._languages, key=lambda name: float(logits[self._languages[name]])).strip("<|>")

    def _move_on(self, each: _Recording, segments: Any, no_speech: float, average: float) -> None:
        decode, window_s = self._processor.tokenizer.decode, each.seek * self._extractor.hop_length / self.rate
        for segment in segments:
            tokens = segment["tokens"].tolist()
            text = decode([token for token in tokens if token < self._first_time], skip_special_tokens=True)
            start, end = (min(window_s + float(segment[side]), each.seconds) for side in ("start", "end"))
            words = self._words(each, tokens, segment, window_s) if each.mode.has_words else ()
            each.segments.append(_Segment(text, start, end, each.seek, tokens, average, no_speech, words))
        last = segments[-1]["tokens"].tolist()[-2:] if segments else []
        if len(last) == 2 and min(last) >= self._first_time:
            # The window ends within a segment: the next one begins where the last whole segment ends.
            each.seek += max(1, last[0] - self._first_time) * self._stride
        else:
            each.seek += self._extractor.nb_max_frames

    def _words(self, each: _Recording, tokens: list[int], segment: Any, window_s: float) -> tuple[_Word, ...]:
        """The words of a segment: each ends where its last token does, and begins where the token before it ends."""
        tokenizer = self._processor.tokenizer
        special = set(tokenizer.all_special_ids)
        ends = [float(segment["start"]), *segment["token_timestamps"].tolist()]
        text = [
            (token, place) for place, token in enumerate(tokens) if token < self._first_time and token not in special
        ]
        if not text:
            return ()
        language = self.names.get(each.language, "english")
        words, _, indices = self._split(tokenizer, [token for token, _ in text], language)
        found = []
        for word, within in zip(words, indices, strict=True):
            first, last = text[within[0]][1], text[within[-1]][1]
            start, end = (min(window_s + second, each.seconds) for second in (ends[first], ends[last + 1]))
            found.append(_Word(word, start, max(start, end)))
        return tuple(found)


class _Scores:
    """Hears the scores of each step of a generation, for the average log-probability of each row's tokens."""

    def __init__(self, torch: Any, end: int) -> None:
        self._torch = torch
        self._end = end
        self._previous: Any = None

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Called before each step with the tokens so far [rows, tokens] and the scores of the next [rows, words]."""
        if self._previous is None:
            self._sums, self._counts = (self._torch.zeros(len(scores), device=scores.device) for _ in range(2))
            self._is_open = self._torch.ones(len(scores), dtype=self._torch.bool, device=scores.device)
        else:
            self._take(input_ids[:, -1])
        self._previous = scores.float().log_softmax(-1)
        return scores

    def averages(self) -> list[float]:
        """After the last step, whose tokens end the rows that are still open."""
        self._take(self._torch.full_like(self._sums, self._end, dtype=self._torch.long))
        found: list[float] = (self._sums / self._counts.clamp(min=1)).tolist()
        return found

    def _take(self, tokens: Any) -> None:
        heard = self._previous.gather(1, tokens[:, None])[:, 0]
        counted = self._is_open & heard.isfinite()
        self._sums += heard.where(counted, 0.0)
        self._counts += counted
        self._is_open &= tokens != self._end
