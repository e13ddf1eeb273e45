"""What is an encoder, and how long its texts are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.contract import Purpose
from modelserver_backends.llm.embedding.recognition import is_encoder, num_positions, purpose_of, usual_len

from modelserver.errors import InvalidArgumentError, UnsupportedError


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"model_type": "bert"}, True),
        ({"model_type": "bert", "is_decoder": True}, False),
        ({"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]}, True),
        ({"model_type": "llama"}, False),
        ({"model_type": "llama", "is_causal": False}, True),
        ({"model_type": "llama", "is_causal": None}, False),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, True),
        ({"model_type": "gemma4", "use_bidirectional_attention": "vision"}, False),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, False),
        ({"model_type": "t5", "architectures": ["T5EncoderModel"]}, True),
        ({"model_type": "t5", "architectures": "T5EncoderModel"}, False),
        ({}, False),
        ({"model_type": ["bert"]}, False),
    ],
)
def test_an_encoder_sees_what_comes_later(tmp_path: Path, entries: dict[str, Any], expected: bool) -> None:
    assert is_encoder(entries, open_checkpoint(tmp_path)) is expected


def test_modules_make_an_encoder_of_an_encoder_decoder(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[]")
    assert is_encoder({"model_type": "t5", "architectures": ["T5Model"]}, open_checkpoint(tmp_path))


POOLING = [{"type": "sentence_transformers.models.Transformer"}, {"type": "sentence_transformers.models.Pooling"}]


@pytest.mark.parametrize(
    ("entries", "modules", "is_from_tokens", "expected"),
    [
        ({"model_type": "bert", "architectures": ["BertForSequenceClassification"]}, None, False, Purpose.CLASSIFY),
        ({"model_type": "bert", "architectures": ["BertForSequenceClassification"]}, POOLING, False, Purpose.EMBED),
        ({"model_type": "bert", "architectures": ["BertForTokenClassification"]}, None, False, Purpose.CLASSIFY_TOKENS),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, None, False, Purpose.CLASSIFY),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, None, False, Purpose.GENERATE),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, None, True, Purpose.CLASSIFY),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, None, False, Purpose.EMBED),
    ],
)
def test_the_head_and_the_modules_say_what_a_checkpoint_is_for(
    tmp_path: Path, entries: dict[str, Any], modules: Any, is_from_tokens: bool, expected: Purpose
) -> None:
    if modules is not None:
        (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert purpose_of(entries, open_checkpoint(tmp_path), is_from_tokens=is_from_tokens) is expected


def test_heads_that_answer_questions_are_refused(tmp_path: Path) -> None:
    entries = {"model_type": "bert", "architectures": ["BertForQuestionAnswering"]}
    with pytest.raises(UnsupportedError, match="holds a BertForQuestionAnswering"):
        purpose_of(entries, open_checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"model_type": "bert", "max_position_embeddings": 512}, 512),
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 0}, 513),
        ({"model_type": "xlm-roberta", "max_position_embeddings": 514}, 512),
        ({"model_type": "mpnet", "max_position_embeddings": 514, "pad_token_id": 0}, 512),
        ({"model_type": "t5", "n_positions": 512}, None),
        ({"model_type": "bert", "max_position_embeddings": "512"}, None),
        ({"model_type": "bert", "max_position_embeddings": -1}, None),
    ],
)
def test_positions_begin_after_the_padding_of_some(entries: dict[str, Any], expected: int | None) -> None:
    assert num_positions(entries) == expected


def test_a_table_without_positions_is_an_error() -> None:
    with pytest.raises(InvalidArgumentError, match="max_position_embeddings 2 leaves no position"):
        num_positions({"model_type": "roberta", "max_position_embeddings": 2, "pad_token_id": 1})


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 512),
        ({"sentence_bert_config": {"max_seq_length": 256}, "tokenizer_config": {"model_max_length": 100}}, 256),
        ({"sentence_roberta_config": {"max_seq_length": 1000}}, 512),
        ({"sentence_bert_config": {"max_seq_length": None}, "tokenizer_config": {"model_max_length": 100}}, 100),
        ({"tokenizer_config": {"model_max_length": int(1e30)}}, 512),
        ({"tokenizer_config": {"model_max_length": True}}, 512),
    ],
)
def test_the_length_is_that_of_sentence_transformers(
    tmp_path: Path, files: dict[str, dict[str, Any]], expected: int
) -> None:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert usual_len({"model_type": "bert", "max_position_embeddings": 512}, open_checkpoint(tmp_path)) == expected


def test_relative_positions_have_no_end(tmp_path: Path) -> None:
    assert usual_len({"model_type": "t5"}, open_checkpoint(tmp_path)) == 512
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 4000}')
    assert usual_len({"model_type": "t5"}, open_checkpoint(tmp_path)) == 4000
