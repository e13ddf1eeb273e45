"""Whether a checkpoint is an encoder, and how long its texts may be: by its JSON files, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelserver.backend import InvalidArgumentError, UnsupportedError

from ..checkpoint import Checkpoint

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


def check_purpose(entries: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """UnsupportedError for an encoder that was trained to tell classes: its hidden states mean nothing alone."""
    heads = [name for name in _architectures(entries) if "Classification" in name or "QuestionAnswering" in name]
    if heads and not checkpoint.find(MODULES_JSON):
        raise UnsupportedError(
            f"{checkpoint.place} holds a {heads[0]}, which classifies: this backend makes embeddings of encoders; "
            "serve it with the pytorch or onnx backend"
        )


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
