"""What a checkpoint is for, its labels, and how long its texts may be: by its JSON files, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelserver.backend import InvalidArgumentError, UnsupportedError

from ..checkpoint import Checkpoint
from ..contract import Purpose

MODULES_JSON = "modules.json"
# Families of transformers whose tokens see those that come later, and nothing of what fills a batch up: convbert, fnet,
# mobilebert and nystromformer mix padding into the text, big_bird and reformer attend otherwise in longer batches.
ENCODERS = frozenset(
    {
        "albert",
        "bert",
        "camembert",
        "data2vec-text",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "ernie",
        "eurobert",
        "gte",
        "jina_embeddings_v3",
        "megatron-bert",
        "modernbert",
        "mpnet",
        "nomic_bert",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roformer",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
# Of these the first half alone can be a checkpoint: `T5EncoderModel`.
ENCODER_DECODERS = frozenset({"mt5", "t5", "umt5"})
# The module of sentence-transformers by which a language model scores a pair of texts.
LOGIT_SCORE = "LogitScore"
# Positions begin after the padding token's id, so that a table has fewer of them than rows.
_OFFSET_FAMILIES = frozenset(
    {
        "camembert",
        "data2vec-text",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
_USUAL_PAD_TOKEN_ID = 1
# Tokenizers without a limit state a number far above this.
_LONGEST_SAID = 1 << 24
_USUAL_LEN = 512


def is_encoder(entries: Mapping[str, Any], checkpoint: Checkpoint) -> bool:
    """By the entries of config.json: whether tokens see those that come later.

    So they do in the families above, and in those of decoders where config.json has it (`use_bidirectional_attention`
    of Gemma, `is_causal`).
    """
    family = _family(entries)
    if family in ENCODER_DECODERS:
        return bool(checkpoint.find(MODULES_JSON)) or any("EncoderModel" in name for name in _architectures(entries))
    if family in ENCODERS:
        return not entries.get("is_decoder")
    # Of models that see pictures, "vision" says it of these alone.
    return entries.get("use_bidirectional_attention") in (True, "all") or entries.get("is_causal") is False


def purpose_of(entries: Mapping[str, Any], checkpoint: Checkpoint, *, is_from_tokens: bool = False) -> Purpose:
    """By the entries of config.json. `is_from_tokens`: an option makes a classifier of a language model.

    UnsupportedError for an encoder with a head that answers questions, whose hidden states mean nothing alone, and for
    a GGUF file with a head.
    """
    kinds = module_kinds(checkpoint)
    heads = [name for name in _architectures(entries) if "For" in name]
    if checkpoint.place.is_file() and any("ForSequenceClassification" in name for name in heads):
        raise UnsupportedError(
            f"{checkpoint.place} is a GGUF file which classifies: classifiers must be directories in the layout of "
            "Hugging Face"
        )
    if "Pooling" not in kinds:
        if is_from_tokens or LOGIT_SCORE in kinds or any("ForSequenceClassification" in name for name in heads):
            return Purpose.CLASSIFY
        if any("ForTokenClassification" in name for name in heads):
            return Purpose.CLASSIFY_TOKENS
    if not is_encoder(entries, checkpoint):
        return Purpose.GENERATE
    others = [name for name in heads if "QuestionAnswering" in name or "MultipleChoice" in name]
    if others and not kinds:
        raise UnsupportedError(
            f"{checkpoint.place} holds a {others[0]}: this backend serves encoders that embed, and heads that classify "
            "texts or tokens; serve it with the pytorch or onnx backend"
        )
    return Purpose.EMBED


def module_kinds(checkpoint: Checkpoint) -> Mapping[str, str]:
    """The classes of the modules in modules.json, without their packages, and the directory of each."""
    listed = checkpoint.document(MODULES_JSON) if checkpoint.find(MODULES_JSON) else []
    found = {}
    for one in listed if isinstance(listed, list) else []:
        if isinstance(one, dict) and isinstance(one.get("type"), str):
            found[one["type"].rpartition(".")[2]] = str(one.get("path") or "")
    return found


def labels_of(entries: Mapping[str, Any], checkpoint: Checkpoint, from_tokens: tuple[str, ...] | None) -> list[str]:
    """The names of a classifier's classes, in the order of its scores. InvalidArgumentError for broken entries.

    Of a language model that scores by `from_tokens`: one, for up to two tokens, or the tokens themselves.
    """
    if from_tokens is not None and len(from_tokens) > 2:
        return list(from_tokens)
    if from_tokens is not None or LOGIT_SCORE in module_kinds(checkpoint):
        return ["LABEL_0"]
    named = entries.get("id2label")
    if named is None:
        count = entries.get("num_labels", 2)
        return [f"LABEL_{index}" for index in range(count if isinstance(count, int) else 2)]
    try:
        by_index = {int(index): str(name) for index, name in named.items()}
        return [by_index[index] for index in range(len(by_index))]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InvalidArgumentError(f"{checkpoint.place}/config.json: id2label must name classes 0 to N") from None


def usual_len(entries: Mapping[str, Any], checkpoint: Checkpoint) -> int:
    """The most tokens of a text: the limit of sentence-transformers, or else that of the tokenizer."""
    said: int | None = None
    for name in checkpoint.find("sentence_*_config.json"):
        said = _limit(checkpoint.entries(name).get("max_seq_length"))
    said = said or _limit(checkpoint.entries("tokenizer_config.json").get("model_max_length"))
    positions = num_positions(entries)
    if said is None:
        said = positions or _USUAL_LEN
    return said if positions is None else min(said, positions)


def num_positions(entries: Mapping[str, Any]) -> int | None:
    """The longest text that the network has positions for; None where they are relative and without end."""
    family = _family(entries)
    if family in ENCODER_DECODERS:
        return None
    rows = entries.get("max_position_embeddings")
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        return None
    if family not in _OFFSET_FAMILIES:
        return rows
    pad_token_id = entries.get("pad_token_id")
    # MPNet's offset is written into its code.
    offset = pad_token_id if isinstance(pad_token_id, int) and family != "mpnet" else _USUAL_PAD_TOKEN_ID
    if rows <= offset + 1:
        raise InvalidArgumentError(f"config.json: max_position_embeddings {rows} leaves no position for a token")
    return rows - offset - 1


def _family(entries: Mapping[str, Any]) -> str:
    family = entries.get("model_type")
    return family if isinstance(family, str) else ""


def _architectures(entries: Mapping[str, Any]) -> list[str]:
    names = entries.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _limit(value: Any) -> int | None:
    is_one = isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LONGEST_SAID
    return value if is_one else None
