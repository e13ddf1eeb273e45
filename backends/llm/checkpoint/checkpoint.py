"""The seam between an engine and the files of a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from types import TracebackType

    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """What a tokenizer is made from. `document` is the JSON of the library `tokenizers`; `path` names it in errors.

    `config` has the entries of tokenizer_config.json, `special_tokens_map` those of special_tokens_map.json.
    """

    path: Path
    document: str
    config: Mapping[str, Any] = field(default_factory=dict)
    special_tokens_map: Mapping[str, Any] = field(default_factory=dict)


class Checkpoint(Protocol):
    """Config, tensors, tokenizer and chat template of one model, whatever the format of its files.

    A context manager: leaving it closes the files of tensors, which are opened when they are first asked for. Documents
    may be read at any time. One thread at a time may use it. Raises InvalidArgumentError, which names the file, for
    what is missing or broken.

    Names of tensors and modules are those inside the decoder, as transformers' LlamaModel has them
    (`layers.0.mlp.up_proj.weight`), whatever wraps them in the file.
    """

    @property
    def place(self) -> Path:
        """What `open_checkpoint` opens it by, in another process too."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """The entries of config.json, or what stands for it; `model_type` is one of them."""
        ...

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The entries of generation_config.json; none without that file."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a text by these configs; a tokenizer may know others."""
        ...

    @property
    def tokenizer(self) -> TokenizerFiles: ...

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Jinja templates by name; "default" is the usual one."""
        ...

    @property
    def digest(self) -> bytes:
        """32 bytes that differ where the config, a tensor or its file differ. No tensor is read for it.

        A file that is written to has another time of status change (`file_stamp`), whatever its bytes are.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Of all tensors, as they are stored."""
        ...

    @property
    def transformers_directory(self) -> Path:
        """The directory from which transformers can load it. UnsupportedError for a format that it does not read."""
        ...

    # Documents that some checkpoints have besides.

    def find(self, pattern: str) -> list[str]:
        """The documents whose names match, sorted."""
        ...

    def document(self, name: str) -> Any:
        """A JSON document, parsed."""
        ...

    def entries(self, name: str) -> dict[str, Any]:
        """The entries of a JSON document that holds an object; none if there is no such document."""
        ...

    def nested(self, name: str) -> Checkpoint:
        """What lies in a directory inside: another module's config and tensors."""
        ...

    # Tensors.

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        ...

    def names(self) -> list[str]:
        """Of all tensors, sorted."""
        ...

    def module(self, name: str) -> str | None:
        """The name by which the file calls a module (`layers.0.mlp.up_proj`); None if no tensor belongs to it.

        Configs of quantization list modules by these names.
        """
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """As it is stored, in memory of its own."""
        ...

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        """The same of some rows of a matrix, which are its own."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


# A config of a text part without one of these relies on what is usual.
_SIZES = frozenset({"num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size"})


def text_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The checkpoint's config; of a multi-modal model, its text part, whose `model_type` then ends in `_text`.

    Such a part may lack whatever is usual for its kind; older ones stand in the config itself.
    """
    entries = checkpoint.config
    text = entries.get("text_config")
    if isinstance(text, dict):
        outer = {name: entries[name] for name in ("dtype", "torch_dtype", "eos_token_id") if name in entries}
        entries = {**outer, "model_type": f"{entries['model_type']}_text", **text}
        if not entries.keys() >= _SIZES:
            entries = {**_usual_entries(entries), **entries}
    elif "vision_config" in entries:
        entries = {**entries, "model_type": f"{entries['model_type']}_text"}
    return entries


def _usual_entries(entries: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers makes of a config of this kind; nothing if it is not installed, or does not know it."""
    try:
        from transformers import AutoConfig

        given = {name: value for name, value in entries.items() if name != "model_type"}
        usual: dict[str, Any] = AutoConfig.for_model(entries["model_type"], **given).to_dict()
    except (ImportError, ValueError, TypeError, KeyError):
        return {}
    return usual


def file_stamp(status: os.stat_result) -> str:
    """What is another one after a file was written to, or replaced.

    The system itself sets the time of status change, at each write and each rename. No program can set it back, as it
    can the time of modification.
    """
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def config_path(checkpoint: Checkpoint) -> Path:
    """Where the config stands, for errors: a file of its own, or the one file that has all."""
    return checkpoint.place if checkpoint.place.is_file() else checkpoint.place / "config.json"
