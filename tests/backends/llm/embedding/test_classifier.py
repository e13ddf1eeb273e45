"""Classifiers of texts, of pairs and of tokens beside transformers' own networks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from modelserver_backends.llm.backend import LlmBackend
from modelserver_backends.llm.embedding.instance import EncoderInstance
from support.contexts import context_of, loaded, request_of
from support.llm_models import arrays
from support.recorder import Recorder
from support.tiny_checkpoints import reference_model, write_checkpoint
from support.tiny_classifiers import LABELS, PAIR_TEMPLATE, reference_logits, sigmoid, softmax, write_classifier

from modelserver.backend import DeviceKind, ModelConfig, Placement, ResponseSender, ServerError

QUERY, DOCUMENT = "the model of a server", "answers every request that it is given"
TEXTS = [QUERY, "and then it waits", DOCUMENT * 2, "a"]
PARAMETERS = {"num_threads": "1", "max_num_seqs": "8", "max_num_batched_tokens": "256", "dtype": "float32"}


def served(directory: Path, **parameters: str) -> EncoderInstance:
    """The instance of the model whose version 1 is this directory."""
    config = ModelConfig(name="m", backend="llm", parameters={**PARAMETERS, **parameters})
    backend = loaded(LlmBackend, context_of(directory.parent, config=config))
    instance = backend.create_instance(Placement("m_0", DeviceKind.MODEL))
    assert isinstance(instance, EncoderInstance)
    return instance


def ask(instance: EncoderInstance, *asked: dict[str, Any]) -> list[Recorder]:
    """The answers to requests that come together."""
    recorders = []
    for inputs in asked:
        recorders.append(Recorder())
        request = request_of(**arrays(**inputs))
        request.own_sender = ResponseSender(recorders[-1])
        instance.add(request)
        request.own_sender = None
    while instance.has_work:
        instance.step()
    return recorders


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "distilbert", "deberta_v2", "llama", "qwen3"])
def test_scores_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    directory = write_classifier(tmp_path / "1", family)
    answers = ask(served(directory), *({"text_input": text} for text in TEXTS))
    for text, answer in zip(TEXTS, answers, strict=True):
        expected = softmax(reference_logits(directory, text))
        np.testing.assert_allclose(answer.column("scores"), expected, atol=2e-5)
        assert answer.column("label") == [LABELS[int(expected.argmax())].encode()]


@pytest.mark.parametrize("family", ["bert", "xlm_roberta", "qwen3"])
def test_pairs_have_the_types_and_marks_of_the_tokenizer(tmp_path: Path, family: str) -> None:
    values = {"type_vocab_size": 2} if family == "bert" else {}
    directory = write_classifier(tmp_path / "1", family, ["relevant"], values=values)
    answers = ask(
        served(directory),
        *({"text_input": QUERY, "text_pair": text} for text in TEXTS),
        {"text_input": QUERY, "text_pair": DOCUMENT, "raw_scores": True},
    )
    for text, answer in zip(TEXTS, answers[:-1], strict=True):
        np.testing.assert_allclose(
            answer.column("scores"), sigmoid(reference_logits(directory, QUERY, text)), atol=2e-5
        )
    np.testing.assert_allclose(answers[-1].column("scores"), reference_logits(directory, QUERY, DOCUMENT), atol=1e-4)


def test_pairs_that_are_too_long_are_cut_as_the_library_cuts_them(tmp_path: Path) -> None:
    directory = write_classifier(tmp_path / "1", "bert", ["relevant"], values={"type_vocab_size": 2})
    instance = served(directory)
    pairs = [(QUERY, DOCUMENT * 9), (DOCUMENT * 9, QUERY), (DOCUMENT * 9, QUERY * 9)]
    answers = ask(instance, *({"text_input": a, "text_pair": b, "truncate_prompt_tokens": -1} for a, b in pairs))
    for (first, second), answer in zip(pairs, answers, strict=True):
        expected = reference_logits(directory, first, second, truncation=True, max_length=48)
        np.testing.assert_allclose(answer.column("scores"), sigmoid(expected), atol=2e-5)
        assert answer.column("num_input_tokens") == [48]
    (cut,) = ask(instance, {"text_input": "a", "text_pair": "a a a a", "truncate_pair_tokens": 2})
    np.testing.assert_allclose(cut.column("scores"), sigmoid(reference_logits(directory, "a", "a a")), atol=2e-5)
    with pytest.raises(ServerError, match="and this model takes 1 to 48"):
        ask(instance, {"text_input": QUERY, "text_pair": DOCUMENT * 9})


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_each_token_has_scores_of_its_own(tmp_path: Path, family: str) -> None:
    directory = write_classifier(tmp_path / "1", family, kind="Token")
    for text, answer in zip(TEXTS, ask(served(directory), *({"text_input": text} for text in TEXTS)), strict=True):
        expected = softmax(reference_logits(directory, text, kind="TokenClassification"))
        np.testing.assert_allclose(answer.column("token_scores"), expected, atol=2e-5)
        assert answer.column("label") == [LABELS[index].encode() for index in expected.argmax(axis=-1)]


def test_a_language_model_scores_a_pair_by_its_next_token(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "1", "qwen3")
    described = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**described, "chat_template": PAIR_TEMPLATE}))
    instance = served(directory, classifier_from_token='["o", "y"]')
    tokenizer = instance.encoder.tokenizer
    text = f"<|bos|><|im_start|>{QUERY}<|im_end|>{DOCUMENT}<|im_start|>"
    logits = reference_model(directory)(_ids(tokenizer.encode(text, False))).logits[0, -1].detach()
    expected = (logits[tokenizer.token_to_id("y")] - logits[tokenizer.token_to_id("o")]).item()
    pair = {"text_input": QUERY, "text_pair": DOCUMENT}
    raw, scored = ask(instance, {**pair, "raw_scores": True}, pair)
    np.testing.assert_allclose(raw.column("scores"), [expected], atol=1e-3)
    np.testing.assert_allclose(scored.column("scores"), sigmoid(np.array([expected])), atol=1e-3)


def test_sentence_transformers_modules_say_which_tokens_score(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "1")
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {"idx": 1, "name": "1", "path": "1_L", "type": "sentence_transformers.cross_encoder.modules.LogitScore"},
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_L").mkdir()
    (directory / "1_L" / "config.json").write_text('{"true_token_id": 70, "false_token_id": null}')
    instance = served(directory)
    (raw,) = ask(instance, {"text_input": QUERY, "raw_scores": True})
    logits = reference_model(directory)(_ids(instance.encoder.tokenizer.encode(QUERY))).logits[0, -1].detach()
    np.testing.assert_allclose(raw.column("scores"), [logits[70].item()], atol=1e-3)


def _ids(token_ids: list[int]) -> Any:
    import torch

    return torch.tensor([token_ids])


@pytest.mark.parametrize(
    ("files", "values", "activation"),
    [
        ({}, {}, softmax),
        ({}, {"problem_type": "multi_label_classification"}, sigmoid),
        ({}, {"problem_type": "regression"}, np.asarray),
        ({}, {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, sigmoid),
        ({"config_sentence_transformers.json": {"activation_fn": "torch.nn.modules.linear.Identity"}}, {}, np.asarray),
    ],
)
def test_the_checkpoint_says_how_logits_become_scores(
    tmp_path: Path, files: dict[str, Any], values: dict[str, Any], activation: Any
) -> None:
    directory = write_classifier(tmp_path / "1", files=files, values=values)
    (answer,) = ask(served(directory), {"text_input": QUERY})
    np.testing.assert_allclose(answer.column("scores"), activation(reference_logits(directory, QUERY)), atol=2e-5)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"text_input": "a", "operation": "embed"},
            "this model classifies texts: it does not embed; expected classify",
        ),
        ({"input_ids": [5], "text_pair": "a"}, "'text_pair' goes with the input 'text_input'"),
        ({"text_input": "a", "text_pair": "b", "add_special_tokens": False}, "expected true for a pair"),
        ({"text_input": "a", "text_pair": "b", "truncate_pair_tokens": 0}, "expected 1 or more, got 0"),
        ({"input_ids": [300]}, "token 300 is outside"),
    ],
)
def test_what_does_not_fit_is_refused(classifier: EncoderInstance, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ServerError) as caught:
        ask(classifier, inputs)
    assert message in caught.value.message
    assert not classifier.has_work


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> EncoderInstance:
    return served(write_classifier(tmp_path_factory.mktemp("classifier") / "1"))


@pytest.mark.parametrize(
    ("family", "labels", "files", "values", "message"),
    [
        ("bert", LABELS, {"config_sentence_transformers.json": {"activation_fn": "torch.nn.Tanh"}}, {}, "Tanh"),
        ("bert", LABELS, {}, {"id2label": {0: "a", 2: "b"}}, "id2label must name classes 0 to N"),
        ("xlm", LABELS, {}, {}, "family"),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused(
    tmp_path: Path, family: str, labels: Any, files: dict[str, Any], values: dict[str, Any], message: str
) -> None:
    directory = write_classifier(tmp_path / "1", "bert", labels, files=files)
    config = json.loads((directory / "config.json").read_text())
    model_type = config["model_type"] if family == "bert" else family
    (directory / "config.json").write_text(json.dumps({**config, **values, "model_type": model_type}))
    with pytest.raises(ServerError, match=message):
        served(directory)
