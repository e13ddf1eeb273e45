"""A checkpoint as Hugging Face lays it out: a directory with config.json, safetensors and the tokenizer's JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from modelserver.backend import InvalidArgumentError, parse_json

from .checkpoint import TokenizerFiles

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from .safetensors_files import SafetensorsFiles

CONFIG, _GENERATION_CONFIG = "config.json", "generation_config.json"
# What older and other writers describe quantization in, and the method whose file it is.
_QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
# What a directory may have in place of tokenizer.json, and what the file is.
_SLOW_FILES = {
    "tokenizer.model": "a SentencePiece model",
    "spiece.model": "a SentencePiece model",
    "tekken.json": "Mistral's own format",
    "vocab.json": "the vocabulary of a slow BPE tokenizer",
    "vocab.txt": "a WordPiece vocabulary",
    "qwen.tiktoken": "a tiktoken vocabulary",
}


class HfCheckpoint:
    """See `Checkpoint`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._opened: SafetensorsFiles | None = None

    @property
    def place(self) -> Path:
        return self._directory

    @property
    def transformers_directory(self) -> Path:
        return self._directory

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """`quantization_config` is there however the checkpoint names it."""
        path = self._directory / CONFIG
        try:
            entries = parse_json(path.read_bytes(), str(path))
        except FileNotFoundError:
            raise InvalidArgumentError(
                f"no {CONFIG} in {self._directory}: an LLM needs a Hugging Face checkpoint"
            ) from None
        except ValueError as error:
            raise InvalidArgumentError(f"{path} is not JSON: {error}") from None
        if not isinstance(entries, dict) or not isinstance(entries.get("model_type"), str):
            raise InvalidArgumentError(f"{path} has no model_type")
        if "quantization_config" not in entries and (found := self._quantization(entries)) is not None:
            entries["quantization_config"] = found
        return entries

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        return self.entries(_GENERATION_CONFIG)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        entries = self.entries(CONFIG)
        text = entries.get("text_config")
        return _eos_token_ids(self.generation_config, text if isinstance(text, dict) else {}, entries)

    @property
    def tokenizer(self) -> TokenizerFiles:
        path = self._directory / "tokenizer.json"
        if not path.is_file():
            raise InvalidArgumentError(_without_tokenizer(self._directory))
        return TokenizerFiles(
            path=path,
            document=_text(path),
            config=self.entries("tokenizer_config.json"),
            special_tokens_map=self.entries("special_tokens_map.json"),
        )

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Files of their own go before tokenizer_config.json."""
        named: dict[str, str] = {}
        for document in ("tokenizer_config.json", "chat_template.json"):
            named |= self._named_templates(document)
        path = self._directory / "chat_template.jinja"
        if path.is_file():
            named = {"default": _text(path)}
        for path in sorted((self._directory / "additional_chat_templates").glob("*.jinja")):
            named[path.stem] = _text(path)
        return named

    def _named_templates(self, document: str) -> dict[str, str]:
        value = self.entries(document).get("chat_template")
        if value is None:
            return {}
        pairs: list[tuple[Any, Any]] = [("default", value)]
        if isinstance(value, list):
            pairs = [(one.get("name"), one.get("template")) for one in value if isinstance(one, dict)]
        elif isinstance(value, dict):
            pairs = list(value.items())
        if not all(isinstance(name, str) and isinstance(template, str) for name, template in pairs):
            raise InvalidArgumentError(
                f"{self._directory / document}: chat_template must be a text, or texts by name, got {value!r:.80}"
            )
        return dict(pairs)

    @property
    def digest(self) -> bytes:
        """Over the config, where each tensor lies, and size and time of change of each file."""
        state = hashlib.blake2b(digest_size=32, person=b"hf checkpoint")
        state.update(json.dumps(self.config, sort_keys=True, default=str).encode())
        self._tensors.add_to_digest(state.update)
        return state.digest()

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._directory.glob("*.safetensors"))

    def find(self, pattern: str) -> list[str]:
        return sorted(str(path.relative_to(self._directory)) for path in self._directory.glob(pattern))

    def document(self, name: str) -> Any:
        path = self._directory / name
        try:
            return json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"{path} cannot be read as JSON: {error}") from error

    def entries(self, name: str) -> dict[str, Any]:
        path = self._directory / name
        if not path.exists():
            return {}
        content = self.document(name)
        if not isinstance(content, dict):
            raise InvalidArgumentError(f"{path} must hold a JSON object, it holds a {type(content).__name__}")
        return content

    def nested(self, name: str) -> HfCheckpoint:
        return HfCheckpoint(self._directory / name)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        return self._tensors.names()

    def module(self, name: str) -> str | None:
        return self._tensors.module(name)

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors.tensor(name)

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        return self._tensors.rows(name, first, count)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors.dtype(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _quantization(self, entries: Mapping[str, Any]) -> dict[str, Any] | None:
        """How the weights are quantized, by an older name in config.json or by another file."""
        if isinstance(described := entries.get("compression_config"), dict):
            return {"quant_method": "compressed-tensors", **described}
        for name, method in _QUANTIZATION_FILES.items():
            if described := self.entries(name):
                return {"quant_method": method, **described}
        return None

    @property
    def _tensors(self) -> SafetensorsFiles:
        if self._opened is None:
            from .safetensors_files import SafetensorsFiles

            self._opened = SafetensorsFiles(self._directory)
        return self._opened


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error}") from None


def _without_tokenizer(directory: Path) -> str:
    if not directory.is_dir():
        return f"there is no directory {directory}: name the one that a checkpoint is in; nothing is downloaded"
    others = [f"{name} ({what})" for name, what in _SLOW_FILES.items() if (directory / name).is_file()]
    if not others:
        return f"{directory} has no tokenizer.json, so text cannot become tokens: copy it from the checkpoint"
    return (
        f"{directory} has no tokenizer.json, only {', '.join(others)}; convert it once: "
        "AutoTokenizer.from_pretrained(directory).save_pretrained(directory) of transformers writes tokenizer.json"
    )


def _eos_token_ids(*configs: Mapping[str, Any]) -> frozenset[int]:
    """The tokens that end a text, by the first config that has any.

    generation_config.json knows them better than config.json: chat models end turns by several.
    """
    for entries in configs:
        value = entries.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        found = frozenset(one for one in ids if isinstance(one, int) and not isinstance(one, bool))
        if found:
            return found
    return frozenset()
