"""Directories of Hugging Face for tasks other than generation answer as transformers does."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import tqdm
import transformers
from PIL import Image
from support.clients import ClientError, ProtocolClient
from support.contexts import context_of, loaded
from support.serving import RunningServer, running_server
from tokenizers import models, pre_tokenizers, processors

from modelserver.backend import ConfigError, InvalidArgumentError, Placement
from modelserver.backend.discovery import find_backend
from modelserver.backend.model_files import backend_for_model_files

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS += ["where", "is", "ada", "in", "london", "paris", "works", "lives", "and"]
TEXTS = ["ada lives in london", "paris is where ada works and lives"]
TAGS = ["O", "B-PER", "I-PER", "B-LOC"]


def bert(task: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=24, **SIZES, **settings)
    model = getattr(transformers, f"BertFor{task}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)  # decided answers
    return model


def tokenizer() -> Any:
    made = tokenizers.Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=24, **names)


def png(width: int, height: int) -> bytes:
    pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def labels(*names: str) -> dict[str, Any]:
    return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of one tiny model for each task."""
    tqdm.tqdm.monitor_interval = 0  # no thread
    root = tmp_path_factory.mktemp("tasks")
    made = {
        "texts": (bert("SequenceClassification", **labels("bad", "good", "so-so")), tokenizer()),
        "entailment": (bert("SequenceClassification", **labels("contradiction", "neutral", "entailment")), tokenizer()),
        "names": (bert("TokenClassification", **labels(*TAGS)), tokenizer()),
        "answers": (bert("QuestionAnswering"), tokenizer()),
        "words": (bert("MaskedLM"), tokenizer()),
    }
    sized = {"image_size": 16, "patch_size": 8}
    pictures = transformers.ViTConfig(**SIZES, **sized, **labels("cat", "dog"))
    made["pictures"] = (
        transformers.ViTForImageClassification(pictures),
        transformers.ViTImageProcessorPil(size={"height": 16, "width": 16}),
    )
    things = transformers.YolosConfig(
        **SIZES, image_size=[32, 32], patch_size=8, num_detection_tokens=4, **labels("cat", "dog")
    )
    made["things"] = (
        transformers.YolosForObjectDetection(things),
        transformers.YolosImageProcessorPil(size={"height": 32, "width": 32}),
    )
    parts = transformers.SegformerConfig(
        num_encoder_blocks=1, depths=[1], sr_ratios=[1], hidden_sizes=[8], patch_sizes=[3], strides=[2],
        num_attention_heads=[1], mlp_ratios=[1], decoder_hidden_size=8, **labels("sky", "sea"),
    )  # fmt: skip
    made["parts"] = (
        transformers.SegformerForSemanticSegmentation(parts),
        transformers.SegformerImageProcessorPil(size={"height": 16, "width": 16}),
    )
    speech = transformers.Wav2Vec2Config(
        **SIZES, vocab_size=6, conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, pad_token_id=0,
    )  # fmt: skip
    vocabulary = root / "vocab.json"
    vocabulary.write_text(json.dumps({"<pad>": 0, "<unk>": 1, "|": 2, "a": 3, "b": 4, "c": 5}))
    characters = transformers.Wav2Vec2CTCTokenizer(str(vocabulary), bos_token="<pad>", eos_token="<pad>")
    extractor = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True)
    made["speech"] = (transformers.Wav2Vec2ForCTC(speech), transformers.Wav2Vec2Processor(extractor, characters))
    for name, (model, processor) in made.items():
        model.save_pretrained(root / name / "1")
        processor.save_pretrained(root / name / "1")
    task = 'parameters {{ key: "task" value: {{ string_value: "{}" }} }}'
    for name, config in {
        "texts": "text-classification",
        "entailment": "zero-shot-classification",
        "words": "fill-mask",
    }.items():
        (root / name / "config.pbtxt").write_text('backend: "transformers"\n' + task.format(config))
    (root / "things" / "config.pbtxt").write_text('parameters { key: "threshold" value: { string_value: "0" } }')
    return root


@pytest.fixture(scope="session")
def serving(directories: Path) -> Iterator[RunningServer]:
    with running_server(directories) as server:
        yield server


@pytest.fixture
def tasks(protocol: type[ProtocolClient], serving: RunningServer) -> Iterator[ProtocolClient]:
    with protocol(serving) as connected:
        yield connected


def column(*values: str | bytes) -> Any:
    return np.array([[value] for value in values], object)


def pipeline(directories: Path, task: str, name: str, **options: Any) -> Any:
    return transformers.pipeline(task, model=str(directories / name / "1"), device="cpu", **options)


def test_texts_are_classified(tasks: ProtocolClient, directories: Path) -> None:
    answer = tasks.infer("texts", {"text": column(*TEXTS)})
    expected = pipeline(directories, "text-classification", "texts")(TEXTS)
    assert answer["label"][:, 0].tolist() == [each["label"].encode() for each in expected]
    np.testing.assert_allclose(answer["score"][:, 0], [each["score"] for each in expected], rtol=1e-4)
    np.testing.assert_allclose(answer["scores"].sum(axis=1), 1, rtol=1e-5)


def test_labels_may_come_with_the_text(tasks: ProtocolClient, directories: Path) -> None:
    found = ["paris", "london", "ada"]
    answer = tasks.infer("entailment", {"text": column(TEXTS[0]), "labels": np.array([found], object)})
    expected = pipeline(directories, "zero-shot-classification", "entailment")(TEXTS[0], found)
    assert answer["label"].item().decode() == expected["labels"][0]
    scores = dict(zip(expected["labels"], expected["scores"], strict=True))
    np.testing.assert_allclose(answer["scores"][0], [scores[name] for name in found], rtol=1e-4)


def test_names_are_found_in_texts(tasks: ProtocolClient, directories: Path) -> None:
    answer = tasks.infer("names", {"text": column(*TEXTS)})
    expected = pipeline(directories, "token-classification", "names", aggregation_strategy="simple")(TEXTS)
    for row, spans in enumerate(expected):
        count = len(spans)
        assert answer["label"][row, :count].tolist() == [each["entity_group"].encode() for each in spans]
        assert answer["start"][row, :count].tolist() == [each["start"] for each in spans]
        assert answer["end"][row, :count].tolist() == [each["end"] for each in spans]
        np.testing.assert_allclose(answer["score"][row, :count], [each["score"] for each in spans], rtol=1e-4)
        assert set(answer["label"][row, count:].tolist()) <= {b""}
    assert any(expected)


def test_questions_are_answered_from_a_context(tasks: ProtocolClient, directories: Path) -> None:
    context = "ada works in paris and lives in london"
    answer = tasks.infer("answers", {"question": column("where is ada"), "context": column(context)})
    start, end = int(answer["start"].item()), int(answer["end"].item())
    assert answer["answer"].item().decode() == context[start:end] != ""
    model = bert("QuestionAnswering")
    batch = tokenizer()("where is ada", context, return_tensors="pt")
    with torch.inference_mode():
        found = model(**batch)
    words = [index for index, part in enumerate(batch.sequence_ids(0)) if part == 1]
    starts, ends = (each[0, words].softmax(0) for each in (found.start_logits, found.end_logits))
    best = torch.triu(torch.outer(starts, ends))
    assert answer["score"].item() == pytest.approx(float(best.max()), rel=1e-4)
    long = " and ".join([context] * 8)  # several windows
    assert tasks.infer("answers", {"question": column("where is ada"), "context": column(long)})["score"].item() > 0


def test_masks_are_filled(tasks: ProtocolClient, directories: Path) -> None:
    answer = tasks.infer("words", {"text": column("ada lives in [MASK]")})
    expected = pipeline(directories, "fill-mask", "words")("ada lives in [MASK]")
    assert answer["word"][0].tolist() == [each["token_str"].encode() for each in expected]
    with pytest.raises(ClientError, match=r"expected the mask \[MASK\]"):
        tasks.infer("words", {"text": column("ada")})


def test_pictures_are_classified(tasks: ProtocolClient, directories: Path) -> None:
    pictures = [png(20, 30), png(40, 10)]
    answer = tasks.infer("pictures", {"image": column(*pictures)})
    opened = [Image.open(io.BytesIO(each)) for each in pictures]
    expected = pipeline(directories, "image-classification", "pictures")(opened)
    assert [each.decode() for each in answer["label"][:, 0]] == [each[0]["label"] for each in expected]
    np.testing.assert_allclose(answer["score"][:, 0], [each[0]["score"] for each in expected], rtol=1e-4)
    with pytest.raises(ClientError, match="expected a picture such as a PNG or JPEG"):
        tasks.infer("pictures", {"image": column(b"GIF?")})


def test_things_are_found_in_pictures(tasks: ProtocolClient, directories: Path) -> None:
    picture = png(40, 30)
    answer = tasks.infer("things", {"image": column(picture)})
    expected = pipeline(directories, "object-detection", "things")(Image.open(io.BytesIO(picture)), threshold=0.0)
    boxes = [[each["box"][side] for side in ("xmin", "ymin", "xmax", "ymax")] for each in expected]
    assert sorted(map(tuple, answer["boxes"][0].astype(int).tolist())) == sorted(map(tuple, boxes))
    assert sorted(answer["label"][0].tolist()) == sorted(each["label"].encode() for each in expected)


def test_pixels_are_classified(tasks: ProtocolClient, directories: Path) -> None:
    picture = png(12, 9)
    answer = tasks.infer("parts", {"image": column(picture)})
    assert answer["labels"].tolist() == [[b"sky", b"sea"]]
    masks = pipeline(directories, "image-segmentation", "parts")(Image.open(io.BytesIO(picture)))
    for each in masks:
        number = [b"sky", b"sea"].index(each["label"].encode())
        assert ((answer["mask"][0] == number) == (np.asarray(each["mask"]) > 0)).all()


def test_speech_is_written_down(tasks: ProtocolClient, directories: Path) -> None:
    sound = np.random.default_rng(0).normal(size=(1, 4000)).astype(np.float32)
    expected = pipeline(directories, "automatic-speech-recognition", "speech")(sound[0])["text"]
    assert tasks.infer("speech", {"audio": sound})["text"].item().decode() == expected != ""


@pytest.mark.parametrize("name", ["names", "answers", "pictures", "things", "parts", "speech"])
def test_a_directory_is_recognised_by_its_architecture(directories: Path, name: str) -> None:
    assert backend_for_model_files(directories / name / "1") == "transformers"


@pytest.mark.parametrize("name", ["texts", "words"])
def test_encoders_stay_with_the_llm_backend(directories: Path, name: str) -> None:
    assert backend_for_model_files(directories / name / "1") == "llm"


def test_one_bad_picture_fails_its_request_alone(directories: Path) -> None:
    from support.contexts import request_of

    context = context_of(directories / "pictures")
    instance: Any = loaded(find_backend("transformers"), context).create_instance(Placement("p_0"))
    good, bad = request_of(image=column(png(8, 8))), request_of(image=column(b"?"))
    answers = instance.execute([good, bad, good])
    assert isinstance(answers[1], InvalidArgumentError)
    assert [len(answers[index].outputs) for index in (0, 2)] == [3, 3]


def test_a_broken_directory_is_refused_with_the_reason(directories: Path, tmp_path: Path) -> None:
    version = tmp_path / "1"
    version.mkdir()
    config = (directories / "pictures" / "1" / "config.json").read_text()
    (version / "config.json").write_text(config)
    backend = loaded(find_backend("transformers"), context_of(tmp_path))
    with pytest.raises(InvalidArgumentError, match=r"transformers cannot load .*preprocessor_config"):
        backend.create_instance(Placement("p_0"))
    (version / "config.json").write_text('{"architectures": ["TimesFmModel"]}')
    with pytest.raises(ConfigError, match="the architecture TimesFmModel does not tell the task"):
        loaded(find_backend("transformers"), context_of(tmp_path))
    (version / "config.json").write_text("[")
    with pytest.raises(InvalidArgumentError, match=r"config\.json cannot be read"):
        loaded(find_backend("transformers"), context_of(tmp_path))
