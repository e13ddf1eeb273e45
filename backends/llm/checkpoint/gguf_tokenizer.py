"""The tokenizer in a GGUF file's metadata, as the JSON of the library `tokenizers`."""

from __future__ import annotations

import base64
import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from modelserver.backend import InvalidArgumentError, UnsupportedError

from .checkpoint import TokenizerFiles
from .gguf_file import GgufFile

PREFIX = "tokenizer.ggml."
SPACE = "\u2581"


class TokenKind(enum.IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Which token ends a turn stands in no field of many files; it is known by what it looks like.
_TURN_ENDS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<|end_of_text|>",
        "<|return|>",
        "<EOT>",
        "_<EOT>",
    }
)
NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "cls_token": "cls_token_id",
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(ending: str, digits: str, *, upper: str = _UPPER, lower: str = _LOWER, after_marks: str = r"\r\n/") -> str:
    """Words by the case of their letters."""
    words = (rf"{upper}*{lower}+", rf"{upper}+{lower}*")
    first = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{word}{ending}" for word in words)
    return rf"{first}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[{after_marks}]*|{_SPACES}"


GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
# What texts are split by before pairs are merged, each pattern within what those before have left.
PATTERNS: dict[tuple[str, ...], tuple[str, ...]] = {
    (
        "llama-bpe",
        "llama3",
        "llama-v3",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
        "dbrx",
        "smaug-bpe",
        "chatglm-bpe",
        "glm4",
    ): (_LLAMA3,),
    ("qwen2", "deepseek-r1-qwen", "kormo", "stablelm2", "hunyuan", "megrez", "grok-2", "solar-open"): (_QWEN2,),
    ("qwen35",): (_QWEN35,),
    (
        "gpt-2",
        "gpt2",
        "phi-2",
        "mpt",
        "olmo",
        "jais",
        "gigachat",
        "trillion",
        "granite-docling",
        "mellum",
        "a.x-4.0",
        "roberta-bpe",
        "modern-bert",
        "jina-v1-en",
    ): (GPT2_PATTERN,),
    ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"): (r"\p{N}", GPT2_PATTERN),
    ("default",): (r"[\p{P}\$\+<=>\^~\|]+", GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]"),
    ("falcon",): (r"[\p{P}\$\+<=>\^~\|`]+", GPT2_PATTERN, "[0-9][0-9][0-9]"),
    ("bloom",): (r" ?[^(\s|.,!?\x{2026}\x{3002}\x{ff0c}\x{3001}\x{964}\x{6d4}\x{60c})]+",),
    ("tekken",): (_cased("", r"\p{N}"),),
    ("gpt-4o", "llama4", "minimax-m2"): (_cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),),
    ("kimi-k2",): (
        r"\p{Han}+|"
        + _cased(
            f"{_CONTRACTIONS}?",
            r"\p{N}{1,3}",
            upper=_UPPER[:-1] + r"&&[^\p{Han}]]",
            lower=_LOWER[:-1] + r"&&[^\p{Han}]]",
            after_marks=r"\r\n",
        ),
    ),
    ("deepseek-llm",): (
        r"[\r\n]",
        # Letters that have a case, but those of mathematics.
        "\\s?[\\p{Lu}\\p{Ll}\\p{Lt}&&[^\U0001d400-\U0001d7ff]]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _HAN,
        r"\p{N}+",
    ),
    ("deepseek-coder",): (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm"): _DEEPSEEK3,
    ("bailingmoe", "bailingmoe2", "llada-moe"): (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    ("seed-coder",): (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",
    ),
}
_PATTERNS_OF = {name: patterns for names, patterns in PATTERNS.items() for name in names}
# Those that take a whole word from the vocabulary before they merge, and those that begin a text with a token.
_WHOLE_WORDS = frozenset(
    {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
)
_BEGINS = _WHOLE_WORDS
_COMPOSED = frozenset({"qwen2", "qwen35", "deepseek-r1-qwen", "kormo", "modern-bert"})


def named_tokens(file: GgufFile) -> dict[str, Any]:
    """The tokens that have a name, as tokenizer_config.json has them."""
    tokens = file.texts(f"{PREFIX}tokens") or []
    named: dict[str, Any] = {}
    for name, key in NAMED_TOKENS.items():
        token_id = file.integer(PREFIX + key)
        if token_id is not None and 0 <= token_id < len(tokens):
            named[name] = tokens[token_id]
    return named


def end_token_ids(file: GgufFile) -> frozenset[int]:
    """The tokens that end a text or a turn."""
    tokens = file.texts(f"{PREFIX}tokens") or []
    given = (file.integer(PREFIX + key) for key in ("eos_token_id", "eot_token_id", "eom_token_id"))
    found = {token_id for token_id in given if token_id is not None and 0 <= token_id < len(tokens)}
    kinds = _kinds(file, len(tokens))
    found |= {
        token_id
        for token_id, token in enumerate(tokens)
        if kinds[token_id] in (TokenKind.CONTROL, TokenKind.USER_DEFINED) and token in _TURN_ENDS
    }
    return frozenset(found)


def tokenizer_files(file: GgufFile) -> TokenizerFiles:
    """UnsupportedError for a kind of tokenizer that cannot be made, InvalidArgumentError for one that is broken."""
    whole = file.text("tokenizer.huggingface.json")
    document = whole if whole is not None else orjson.dumps(_document(file)).decode()
    return TokenizerFiles(path=file.path, document=document, config=named_tokens(file))


def _document(file: GgufFile) -> dict[str, Any]:
    model = file.text(f"{PREFIX}model")
    tokens = file.texts(f"{PREFIX}tokens")
    if model is None or not tokens:
        raise InvalidArgumentError(f"{file.path} has no tokenizer: its metadata lack {PREFIX}model and {PREFIX}tokens")
    if model not in _MAKERS:
        raise UnsupportedError(f"{file.path} has a tokenizer of the kind {model!r}: {', '.join(_MAKERS)} are supported")
    kinds = _kinds(file, len(tokens))
    if model == "bert":
        tokens = _with_continuations(tokens, kinds)
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(token_id, token, is_special=kinds[token_id] != TokenKind.USER_DEFINED)
            for token_id, token in enumerate(tokens)
            if kinds[token_id] in (TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN)
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
    }
    return {**document, **_MAKERS[model](file, tokens, kinds)}


def _kinds(file: GgufFile, count: int) -> Sequence[int]:
    found = file.numbers(f"{PREFIX}token_type")
    if found is None:
        return [TokenKind.NORMAL] * count
    if len(found) != count:
        raise InvalidArgumentError(f"{file.path}: {PREFIX}token_type has {len(found)} entries for {count} tokens")
    kinds: list[int] = found.tolist()
    return kinds


def _added(token_id: int, token: str, *, is_special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": token, **flags, "special": is_special}


def _vocabulary(tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, int]:
    """Without those that only fill the matrices up."""
    return {token: token_id for token_id, token in enumerate(tokens) if kinds[token_id] != TokenKind.UNUSED}


def _byte_level(file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    """BPE over bytes, as GPT-2 does it."""
    name = file.text(f"{PREFIX}pre") or "default"
    if name not in _PATTERNS_OF:
        raise UnsupportedError(
            f"{file.path}: {PREFIX}pre {name!r} is not known, so that texts would be split wrongly; known are "
            f"{', '.join(sorted(_PATTERNS_OF))}"
        )
    vocabulary = _vocabulary(tokens, kinds)
    split = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in _PATTERNS_OF[name]
    ]
    has_prefix = bool(file.flag(f"{PREFIX}add_space_prefix"))
    bytes_of = {"type": "ByteLevel", "add_prefix_space": has_prefix, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if name in _COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*split, bytes_of]},
        "post_processor": _around(file, tokens, begins=name in _BEGINS),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": name in _WHOLE_WORDS,
            "vocab": vocabulary,
            "merges": _merges(file, vocabulary),
        },
    }


def _merges(file: GgufFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs in the order of their ranks; a token itself may begin with the space that stands between both."""
    found = []
    for merge in file.texts(f"{PREFIX}merges") or []:
        space = merge.find(" ", 1)
        left, right = merge[:space], merge[space + 1 :]
        if space > 0 and left in vocabulary and right in vocabulary and left + right in vocabulary:
            found.append((left, right))
    return found


def _sentence_piece(file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    """BPE by the scores of what pairs become, with bytes for characters that no token has."""
    has_prefix = file.flag(f"{PREFIX}add_space_prefix")
    has_prefix = True if has_prefix is None else has_prefix
    replaced: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    prepended: list[dict[str, Any]] = [{"type": "Prepend", "prepend": SPACE}] if has_prefix else []
    stripped = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    unknown = file.integer(f"{PREFIX}unknown_token_id")
    unknown = (
        unknown if unknown is not None else next((i for i, kind in enumerate(kinds) if kind == TokenKind.UNKNOWN), 0)
    )
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepended, *replaced]},
        "post_processor": _around(file, tokens, begins=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *stripped,
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": tokens[unknown] if 0 <= unknown < len(tokens) else None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": _vocabulary(tokens, kinds),
            "merges": _scored_merges(file, tokens, kinds),
        },
    }


def _scores(file: GgufFile, tokens: Sequence[str]) -> list[float]:
    scores = file.numbers(f"{PREFIX}scores")
    if scores is None or len(scores) != len(tokens):
        raise InvalidArgumentError(f"{file.path}: {PREFIX}scores must have a number for each token")
    found: list[float] = scores.tolist()
    return found


def _scored_merges(file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, those of the highest score first."""
    ranked = _scores(file, tokens)
    pieces = {
        token: token_id
        for token_id, token in enumerate(tokens)
        if kinds[token_id] in (TokenKind.NORMAL, TokenKind.USER_DEFINED)
    }
    merges = []
    for token, token_id in pieces.items():
        for cut in range(1, len(token)):
            left, right = pieces.get(token[:cut]), pieces.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-ranked[token_id], token_id, left, right))
    return [(tokens[left], tokens[right]) for _, _, left, right in sorted(merges)]


_CONTINUATION = "##"


def _with_continuations(tokens: Sequence[str], kinds: Sequence[int]) -> list[str]:
    """As BERT's vocabulary has them: it marks what continues a word, and the file what begins one."""
    return [
        token if kind == TokenKind.CONTROL else token[1:] if token.startswith(SPACE) else _CONTINUATION + token
        for token, kind in zip(tokens, kinds, strict=True)
    ]


def _word_pieces(file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    """The longest pieces of each word, as BERT has them, between the tokens that begin and end a text."""
    lowercase = file.flag(f"{PREFIX}normalizer.lowercase")
    if lowercase is None:  # by the vocabulary, which older files leave it to
        lowercase = not any(
            token.lower() != token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenKind.NORMAL
        )
    unknown = _first_of(file, "unknown_token_id", usual=100)
    begin = _first_of(file, "cls_token_id", "bos_token_id", usual=101)
    end = _first_of(file, "seperator_token_id", "eos_token_id", usual=102)
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": file.flag(f"{PREFIX}normalizer.strip_accents"),
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _template(file, tokens, [begin], [end]),
        "decoder": {"type": "WordPiece", "prefix": _CONTINUATION, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": tokens[unknown] if unknown < len(tokens) else "[UNK]",
            "continuing_subword_prefix": _CONTINUATION,
            "max_input_chars_per_word": 100,
            "vocab": _vocabulary(tokens, kinds),
        },
    }


def _first_of(file: GgufFile, *names: str, usual: int) -> int:
    found = (file.integer(PREFIX + name) for name in names)
    return next((token_id for token_id in found if token_id is not None and token_id >= 0), usual)


def _unigram(file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    """The likeliest pieces of a text by their scores, as SentencePiece has them for T5 and XLM-RoBERTa."""
    scores = _scores(file, tokens)
    unknown = next((token_id for token_id, kind in enumerate(kinds) if kind == TokenKind.UNKNOWN), 2)
    unknown = _first_of(file, "unknown_token_id", usual=unknown)
    has_prefix = file.flag(f"{PREFIX}add_space_prefix") is not False
    space = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always" if has_prefix else "never"}
    normalizers: list[dict[str, Any]] = []
    table = file.numbers(f"{PREFIX}precompiled_charsmap")
    if table is not None and len(table):
        encoded = base64.b64encode(_checked_charsmap(file, table.astype(np.uint8).tobytes())).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": encoded})
    splits: list[dict[str, Any]] = []
    if file.flag(f"{PREFIX}remove_extra_whitespaces"):
        splits.append({"type": "WhitespaceSplit"})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, {**space, "split": True}]},
        "post_processor": _around(file, tokens, begins=False, ends=True),
        "decoder": {**space, "split": True},
        "model": {
            "type": "Unigram",
            "unk_id": unknown if unknown < len(tokens) else None,
            "vocab": list(zip(tokens, scores, strict=True)),
            "byte_fallback": TokenKind.BYTE in kinds,
        },
    }


def _checked_charsmap(file: GgufFile, table: bytes) -> bytes:
    """A double array and the texts that its values point to. The library panics where one points outside."""
    size = int.from_bytes(table[:4], "little") if len(table) > 4 else 0
    units = np.frombuffer(table, "<u4", min(size, len(table) - 4) // 4, 4).astype(np.int64)
    texts = table[4 + size :]
    is_value = units >> 31 != 0
    offsets = (units >> 10) << ((units & 0x200) >> 6)
    reached = (np.arange(len(units)) ^ offsets)[~is_value] | 0xFF
    values = units[is_value] & 0x7FFFFFFF
    begins = {0, *(at + 1 for at, byte in enumerate(texts) if byte == 0)}
    is_sound = size % 4 == 0 and size == 4 * len(units) and len(units) > 0 and texts.endswith(b"\0")
    if not is_sound or (reached >= len(units)).any() or not begins.issuperset(values.tolist()):
        raise InvalidArgumentError(f"{file.path}: {PREFIX}precompiled_charsmap is damaged: it points outside of itself")
    return table


def _around(file: GgufFile, tokens: Sequence[str], *, begins: bool, ends: bool = False) -> dict[str, Any] | None:
    """What is added before and behind every text."""
    adds, begin_id = file.flag(f"{PREFIX}add_bos_token"), file.integer(f"{PREFIX}bos_token_id")
    adds = begins and begin_id is not None if adds is None else adds
    before = [begin_id] if adds else []
    adds, end_id = file.flag(f"{PREFIX}add_eos_token"), file.integer(f"{PREFIX}eos_token_id")
    adds = ends and end_id is not None if adds is None else adds
    return _template(file, tokens, before, [end_id] if adds else [])


def _template(
    file: GgufFile, tokens: Sequence[str], before: Sequence[int | None], after: Sequence[int | None]
) -> dict[str, Any] | None:
    for token_id in (*before, *after):
        if token_id is None or not 0 <= token_id < len(tokens):
            raise InvalidArgumentError(
                f"{file.path}: texts are to begin or end with the token {token_id}, which its tokenizer does not have"
            )
    if not before and not after:
        return None

    def special(token_id: Any) -> dict[str, Any]:
        return {"SpecialToken": {"id": tokens[token_id], "type_id": 0}}

    def text(name: str) -> list[dict[str, Any]]:
        return [*map(special, before), {"Sequence": {"id": name, "type_id": 0}}, *map(special, after)]

    return {
        "type": "TemplateProcessing",
        "single": text("A"),
        "pair": [*text("A"), *text("B")],
        "special_tokens": {
            tokens[token_id]: {"id": tokens[token_id], "ids": [token_id], "tokens": [tokens[token_id]]}
            for token_id in (*before, *after)
            if token_id is not None
        },
    }


_MAKERS = {"gpt2": _byte_level, "llama": _sentence_piece, "bert": _word_pieces, "t5": _unigram}
