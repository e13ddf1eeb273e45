"""Small tokenizers of every kind that language models have, trained on the spot, and their directories."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog says nothing.",
    "It was the best of times, it was the worst of times; it was the age of wisdom.",
    'Structured: {"name": "value", "numbers": [1, 2.5, -3e8], "nested": {"true": false}}',
    "Ein Mädchen aß größere Äpfel. Où êtes-vous allé? Ёлка стоит в лесу.",
    "你好、世界。こんにちは世界。안녕하세요.",
    "emoji 🙂🙃 family 👨‍👩‍👧 flags 🇩🇪 tabs\tand\n\nlines",
)
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


def byte_level(vocab_size: int = 420) -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([tokenizers.AddedToken("<tool call>", special=False, normalized=False)])
    return tokenizer


def byte_fallback(*, is_stripped: bool = True, vocab_size: int = 420) -> tokenizers.Tokenizer:
    """As Llama 2, Mistral and Phi-3 have it (`is_stripped`), and Gemma (not)."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    prepended = [normalizers.Prepend("▁")] if is_stripped else []
    tokenizer.normalizer = normalizers.Sequence([*prepended, normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if is_stripped else steps)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", *SPECIAL, *[f"<0x{byte:02X}>" for byte in range(256)]],
        limit_alphabet=70,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS[:3], trainer)
    return _with_ordinary_bytes(tokenizer)


def _with_ordinary_bytes(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The byte tokens had to be special to be trained; in a checkpoint they are part of the vocabulary only."""
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if not token["content"].startswith("<0x")]
    return tokenizers.Tokenizer.from_str(json.dumps(described))


def metaspace() -> tokenizers.Tokenizer:
    """As T5 and other Unigram models have it."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS[:4], trainer)
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    """As BERT has it: its decoder is no concatenation."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "byte_fallback_unstripped": functools.partial(byte_fallback, is_stripped=False),
    "metaspace": metaspace,
    "word_piece": word_piece,
}


def write_tokenizer(
    directory: Path,
    tokenizer: tokenizers.Tokenizer,
    *,
    chat_template: Any = None,
    config: dict[str, Any] | None = None,
    generation_config: dict[str, Any] | None = None,
) -> Path:
    """The files of a checkpoint that concern text."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "clean_up_tokenization_spaces": False,
        **(config or {}),
    }
    if chat_template is not None:
        described["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(described))
    if generation_config is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation_config))
    return directory


def with_bos(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer, which now begins every text with <s>."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer
