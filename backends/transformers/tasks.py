"""What each task takes and gives, and how rows become a batch of its network and answers again."""

from __future__ import annotations

import abc
import importlib
import io
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from modelserver.backend import Array, BackendContext, Datatype, FileTensor, InvalidArgumentError

# The inputs, or the answers, of one row by name, without the batch dimension.
Row = Mapping[str, Any]

_TEXT = FileTensor("text", Datatype.BYTES, (-1, 1))
_IMAGE = FileTensor("image", Datatype.BYTES, (-1, 1))
_AUDIO = FileTensor("audio", Datatype.FP32, (-1, -1))
_ENTITIES = (
    FileTensor("label", Datatype.BYTES, (-1, -1)),
    FileTensor("score", Datatype.FP32, (-1, -1)),
)
_SPANS = (FileTensor("start", Datatype.INT64, (-1, -1)), FileTensor("end", Datatype.INT64, (-1, -1)))
# Tokens that two windows of a long text share, at most.
_STRIDE = 64
_NO_LIMIT = 1 << 30
# The library builds networks on a device of the whole process, and fills them later.
_loading = threading.Lock()


def load_network(context: BackendContext, device: str, network: str, processor: str) -> tuple[Any, Any, Any]:
    """Torch, the processor and the network of a directory, by the names of their classes in transformers."""
    import torch

    transformers: Any = importlib.import_module("transformers")
    # Its progress bars would start a thread, and write into the log.
    importlib.import_module("tqdm").tqdm.monitor_interval = 0
    transformers.logging.disable_progress_bar()
    directory = str(context.version_directory)
    prepare = getattr(transformers, processor).from_pretrained(directory, local_files_only=True)
    with _loading:
        model = getattr(transformers, network).from_pretrained(directory, local_files_only=True).eval().to(device)
    return torch, prepare, model


class Task(abc.ABC):
    """A loaded network with its processor. One thread at a time calls `answer`."""

    # The class of transformers that makes the network, and the one that prepares its inputs.
    network: ClassVar[str]
    processor: ClassVar[str] = "AutoTokenizer"
    inputs: ClassVar[tuple[FileTensor, ...]] = (_TEXT,)

    def __init__(self, context: BackendContext, device: str) -> None:
        self.device = device
        self.context = context
        self.torch, self.prepare, self.model = load_network(context, device, self.network, self.processor)
        self.labels = [str(self.model.config.id2label[index]) for index in range(self.model.config.num_labels)]

    @classmethod
    @abc.abstractmethod
    def outputs(cls, num_labels: int) -> tuple[FileTensor, ...]:
        """The outputs of a network with `num_classes` labels."""

    @abc.abstractmethod
    def answer(self, rows: Sequence[Row]) -> list[Row]:
        """An answer for each row. Raises InvalidArgumentError for a row that cannot be read."""

    def run(self, batch: Any) -> Any:
        """The outputs of the network for a prepared batch."""
        with self.torch.inference_mode():
            return self.model(**{name: tensor.to(self.device) for name, tensor in batch.items()})

    @property
    def max_tokens(self) -> int:
        """The longest text that the network takes."""
        longest: int = getattr(self.model.config, "max_position_embeddings", _NO_LIMIT)
        return min(int(self.prepare.model_max_length), longest)

    def tokens(self, *texts: Sequence[str], **options: Any) -> Any:
        """Texts, or pairs of texts, as a padded batch of tokens, cut to what the network takes."""
        max_length = self.max_tokens if self.max_tokens < _NO_LIMIT else None
        options = {"truncation": True, "max_length": max_length, **options}
        return self.prepare(*texts, padding=True, return_tensors="pt", **options)


def _texts(rows: Sequence[Row], name: str = "text") -> list[str]:
    return [row[name].item().decode("utf-8", "replace") for row in rows]


class Classification(Task):
    """Labels with scores: the best one, and the scores of all in the order of the config's `id2label`."""

    @classmethod
    def outputs(cls, num_labels: int) -> tuple[FileTensor, ...]:
        return (
            FileTensor("label", Datatype.BYTES, (-1, 1)),
            FileTensor("score", Datatype.FP32, (-1, 1)),
            FileTensor("scores", Datatype.FP32, (-1, num_labels)),
        )

    def answer(self, rows: Sequence[Row]) -> list[Row]:
        logits = self.run(self.batch(rows)).logits.float()
        is_independent = len(self.labels) == 1 or self.model.config.problem_type == "multi_label_classification"
        scores = (logits.sigmoid() if is_independent else logits.softmax(-1)).cpu().numpy()
        return [
            {"label": self.labels[row.argmax()].encode(), "score": row.max(keepdims=True), "scores": row}
            for row in scores
        ]

    def batch(self, rows: Sequence[Row]) -> Any:
        """The inputs of the network."""
        return self.tokens(_texts(rows))


class TextClassification(Classification):
    network = "AutoModelForSequenceClassification"


class ImageClassification(Classification):
    network = "AutoModelForImageClassification"
    processor = "AutoImageProcessor"
    inputs = (_IMAGE,)

    def batch(self, rows: Sequence[Row]) -> Any:
        return self.prepare(images=[_picture(row) for row in rows], return_tensors="pt")


class AudioClassification(Classification):
    network = "AutoModelForAudioClassification"
    processor = "AutoFeatureExtractor"
    inputs = (_AUDIO,)

    def batch(self, rows: Sequence[Row]) -> Any:
        return _sounds(self.prepare, rows)


class ZeroShotClassification(Task):
    """Scores of labels that come with the text, by a network that judges whether one text follows from another."""

    network = "AutoModelForSequenceClassification"
    inputs = (_TEXT, FileTensor("labels", Datatype.BYTES, (-1, -1)))

    @classmethod
    def outputs(cls, num_labels: int) -> tuple[FileTensor, ...]:  # noqa: ARG003  # those of a request count
        return FileTensor("label", Datatype.BYTES, (-1, 1)), FileTensor("scores", Datatype.FP32, (-1, -1))

    def answer(self, rows: Sequence[Row]) -> list[Row]:
        template = self.context.parameter("hypothesis_template", "This example is {}.")
        labels = [[each.decode("utf-8", "replace") for each in row["labels"]] for row in rows]
        pairs = [
            (text, template.format(label)) for text, row in zip(_texts(rows), labels, strict=True) for label in row
        ]
        batch = self.tokens([text for text, _ in pairs], [label for _, label in pairs], truncation="only_first")
        logits = self.run(batch).logits.float()
        entailed = next((index for index, name in enumerate(self.labels) if name.lower().startswith("entail")), -1)
        if self.context.bool_parameter("multi_label"):
            denied = -1 if entailed == 0 else 0
            entailment = logits[:, [denied, entailed]].softmax(-1)[:, 1].cpu().numpy()
        else:
            entailment = logits[:, entailed].cpu().numpy()
        answers: list[Row] = []
        for row in labels:
            scores, entailment = entailment[: len(row)], entailment[len(row) :]
            if not self.context.bool_parameter("multi_label"):
                powers = np.exp(scores - scores.max())
                scores = powers / powers.sum()
            answers.append({"label": row[int(scores.argmax())].encode(), "scores": scores})
        return answers


class TokenClassification(Task):
    """Spans of a text with labels: neighbouring tokens of one entity are one span."""

    network = "AutoModelForTokenClassification"

    @classmethod
    def outputs(cls, num_labels: int) -> tuple[FileTensor, ...]:  # noqa: ARG003  # as many as there are spans
        return _ENTITIES + _SPANS

    def answer(self, rows: Sequence[Row]) -> list[Row]:
        batch = self.tokens(_texts(rows), return_offsets_mapping=True, return_special_tokens_mask=True)
        offsets = batch.pop("offset_mapping").numpy()
        is_special = batch.pop("special_tokens_mask").numpy().astype(bool)
        probabilities = self.run(batch).logits.float().softmax(-1).cpu().numpy()
        return [self._spans(*each) for each in zip(probabilities, offsets, ~is_special, strict=True)]

    def _spans(self, probabilities: Array, offsets: Array, is_text: Array) -> Row:
        spans: list[tuple[str, list[float], int, int]] = []
        previous = ""
        for scores, (start, end) in zip(probabilities[is_text], offsets[is_text].tolist(), strict=True):
            label = self.labels[scores.argmax()]
            entity = label[2:] if label[:2] in ("B-", "I-") else label
            if spans and previous == entity and not label.startswith("B-"):
                name, found, first, _ = spans.pop()
                spans.append((name, [*found, float(scores.max())], first, end))
            else:
                spans.append((entity, [float(scores.max())], start, end))
            previous = entity
        kept = [span for span in spans if span[0] != "O"]
        return {
            "label": [name.encode() for name, _, _, _ in kept],
            "score": np.array([np.mean(scores) for _, scores, _, _ in kept], np.float32),
            "start": np.array([start for _, _, start, _ in kept], np.int64),
            "end": np.array([end for _, _, _, end in kept], np.int64),
        }


class QuestionAnswering(Task):
    """The part of a context that answers a question."""

    network = "AutoModelForQuestionAnswering"
    inputs = (FileTensor("question", Datatype.BYTES, (-1, 1)), FileTensor("context", Datatype.BYTES, (-1, 1)))

    @classmethod
    def outputs(cls, num_labels: int) -> tuple[FileTensor, ...]:  # noqa: ARG003  # none has labels
        return (
            FileTensor("answer", Datatype.BYTES, (-1, 1)),
            FileTensor("score", Datatype.FP32, (-1, 1)),
            FileTensor("start", Datatype.INT64, (-1, 1)),
            FileTensor("end", Datatype.INT64, (-1, 1)),
        )

    def answer(self, rows: Sequence[Row]) -> list[Row]:
        contexts = _texts(rows, "context")
        # A long context becomes several windows, of which the best answer counts.
        windows = self.tokens(
            _texts(rows, "question"), contexts, truncation="only_second", stride=min(_STRIDE, self.max_tokens // 8),
            return_overflowing_tokens=True, return_offsets_mapping=True,
        )  # fmt: skip
        owners = windows.pop("overflow_to_sample_mapping").tolist()
        offsets = windows.pop("offset_mapping").numpy()
        is_context = np.array([[part == 1 for part in windows.sequence_ids(index)] for index in range(len(owners))])
        found = self.run(windows)
        longest = self.context.int_parameter("max_answer_length", 15)
        best: list[tuple[float, int, int]] = [(-1.0, 0, 0)] * len(rows)
        for index, owner in enumerate(owners):
            start, end = (_within(each[index], is_context[index]) for each in (found.start_logits, found.end_logits))
            scores = np.tril(np.triu(np.outer(start, end)), longest - 1)
            first, last = np.unravel_index(scores.argmax(), scores.shape)
            span = (float(scores[first, last]), int(offsets[index, first, 0]), int(offsets[index, last, 1]))
            best[owner] = max(best[owner], span)
        return [
            {"answer": text[start:end].encode(), "score": [score], "start": [start], "end": [end]}
            for text, (score, start, end) in zip(contexts, best, strict=True)
        ]


class FillMask(Task):
    """The likeliest words for the first mask of a text."""

    network = "AutoModelForMaskedLM"
    NUM_WORDS = 5

    @classmethod
    def outputs(cls, num_labels: int) -> tuple[FileTensor, ...]:  # noqa: ARG003  # none has labels
        shape = (-1, cls.NUM_WORDS)
        return FileTensor("word", Datatype.BYTES, shape), FileTensor("score", Datatype.FP32, shape)

    def answer(self, rows: Sequence[Row]) -> list[Row]:
        batch = self.tokens(_texts(rows))
        is_mask = batch["input_ids"] == self.prepare.mask_token_id
        if not is_mask.any(1).all():
            raise InvalidArgumentError(f"expected the mask {self.prepare.mask_token} in the text")
        logits = self.run(batch).logits.float()
        places = is_mask.int().argmax(1)
        scores, ids = logits[self.torch.arange(len(rows)), places].softmax(-1).topk(self.NUM_WORDS)
        words = [[self.prepare.decode([each]).strip().encode() for each in row] for row in ids.tolist()]
        return [{"word": word, "score": score} for word, score in zip(words, scores.cpu().numpy(), strict=True)]


class ObjectDetection(Task):
    """Things in a picture: boxes (left, top, right, bottom) in pixels, with labels."""

    network = "AutoModelForObjectDetection"
    processor = "AutoImageProcessor"
    inputs = (_IMAGE,)

    @classmethod
    def outputs(cls, num_labels: int) -> tuple[FileTensor, ...]:  # noqa: ARG003  # as many as there are things
        return (*_ENTITIES, FileTensor("boxes", Datatype.FP32, (-1, -1, 4)))

    def answer(self, rows: Sequence[Row]) -> list[Row]:
        pictures = [_picture(row) for row in rows]
        found = self.prepare.post_process_object_detection(
            self.run(self.prepare(images=pictures, return_tensors="pt")),
            threshold=self.context.float_parameter("threshold", 0.5),
            target_sizes=[(picture.height, picture.width) for picture in pictures],
        )
        return [
            {
                "label": [self.labels[index].encode() for index in each["labels"].tolist()],
                "score": each["scores"].float().cpu().numpy(),
                "boxes": each["boxes"].float().cpu().numpy().reshape(-1, 4),
            }
            for each in found
        ]


class Segmentation(Task):
    """The number of a class for each pixel of a picture, and the names of all classes."""

    network = "AutoModelForSemanticSegmentation"
    processor = "AutoImageProcessor"
    inputs = (_IMAGE,)

    @classmethod
    def outputs(cls, num_labels: int) -> tuple[FileTensor, ...]:
        return FileTensor("mask", Datatype.INT64, (-1, -1, -1)), FileTensor("labels", Datatype.BYTES, (-1, num_labels))

    def answer(self, rows: Sequence[Row]) -> list[Row]:
        pictures = [_picture(row) for row in rows]
        found = self.prepare.post_process_semantic_segmentation(
            self.run(self.prepare(images=pictures, return_tensors="pt")),
            target_sizes=[(picture.height, picture.width) for picture in pictures],
        )
        names = [name.encode() for name in self.labels]
        return [{"mask": mask.long().cpu().numpy(), "labels": names} for mask in found]


class SpeechRecognition(Task):
    """Text of sound, by networks that write a character for each moment (CTC)."""

    network = "AutoModelForCTC"
    processor = "AutoProcessor"
    inputs = (_AUDIO,)

    @classmethod
    def outputs(cls, num_labels: int) -> tuple[FileTensor, ...]:  # noqa: ARG003  # labels are characters here
        return (_TEXT,)

    def answer(self, rows: Sequence[Row]) -> list[Row]:
        logits = self.run(_sounds(self.prepare, rows)).logits
        return [{"text": text.encode()} for text in self.prepare.batch_decode(logits.argmax(-1))]


TASKS: dict[str, type[Task]] = {
    "text-classification": TextClassification,
    "zero-shot-classification": ZeroShotClassification,
    "token-classification": TokenClassification,
    "question-answering": QuestionAnswering,
    "fill-mask": FillMask,
    "image-classification": ImageClassification,
    "object-detection": ObjectDetection,
    "image-segmentation": Segmentation,
    "audio-classification": AudioClassification,
    "automatic-speech-recognition": SpeechRecognition,
}
# What the name of an architecture ends in.
ARCHITECTURES = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
    "ForObjectDetection": "object-detection",
    "ForSemanticSegmentation": "image-segmentation",
    "ForAudioClassification": "audio-classification",
    "ForCTC": "automatic-speech-recognition",
}


def _within(logits: Any, is_context: Array) -> Array:
    """The probabilities of the tokens of the context."""
    values = np.where(is_context, logits.float().cpu().numpy(), -np.inf)
    powers = np.exp(values - values.max())
    found: Array = powers / powers.sum()
    return found


def _picture(row: Row) -> Any:
    from PIL import Image

    try:
        return Image.open(io.BytesIO(row["image"].item())).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidArgumentError(f"expected a picture such as a PNG or JPEG: {error}") from error


def _sounds(prepare: Any, rows: Sequence[Row]) -> Any:
    extractor = getattr(prepare, "feature_extractor", prepare)
    sounds = [row["audio"] for row in rows]
    return extractor(sounds, sampling_rate=extractor.sampling_rate, padding=True, return_tensors="pt")
