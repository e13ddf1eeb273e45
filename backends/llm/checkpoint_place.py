"""Where a model's checkpoint lies, and its engine options: version directory, model.json, config.pbtxt."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelserver.backend import (
    BackendContext,
    ConfigError,
    InvalidArgumentError,
    NotFoundError,
    parse_json,
)

from .checkpoint import Checkpoint, find_gguf, is_gguf, open_checkpoint
from .embedding.layout import read_layout
from .embedding.recognition import check_purpose, is_encoder, usual_len
from .options import EngineOptions

MODEL_JSON = "model.json"
CONFIG_JSON = "config.json"
GGUF_FILES = "*.gguf"
_HUB_NAME = re.compile(r"([A-Za-z0-9_][\w.-]*/)?[A-Za-z0-9_][\w.-]*", re.ASCII)
# Parameters of config.pbtxt that are the server's, a frontend's, or of Triton's vLLM backend without an effect here.
_OTHER_PARAMETERS = frozenset(
    {
        "tool_parser",
        "reasoning_parser",
        "inline_execution",
        "instance_in_process",
        "auto_warmup",
        "load_on_demand",
        "keep_alive",
        "pinned",
        "resident_bytes",
        "reload_mode",
        "stored_name",
        "REPORT_CUSTOM_METRICS",
        "ENABLE_VLLM_HEALTH_CHECK",
        "FORCE_CPU_ONLY_INPUT_TENSORS",
    }
)


@dataclass(frozen=True, slots=True)
class CheckpointPlace:
    """`options` come from model.json, and config.pbtxt over it."""

    checkpoint: Checkpoint
    options: EngineOptions
    is_encoder: bool


def find_checkpoint(context: BackendContext) -> CheckpointPlace:
    """Raises NotFoundError with the places looked at, ConfigError for options that are wrong, and what
    `embedding.layout` and `embedding.recognition` say of an encoder that cannot be served."""
    version_directory = context.version_directory
    what = f"model '{context.model_name}' version {context.version}"
    path = version_directory / (context.config.default_model_filename or MODEL_JSON)
    described: Mapping[str, Any] = {}
    place = version_directory
    if path.is_file() and is_gguf(path):
        place = path
    elif path.is_file() and path.name != CONFIG_JSON:
        described = _read(what, path)
        place = _named_place(what, path, described)
        _check_tokenizer(what, path, described, place)
        described = {name: value for name, value in described.items() if name not in ("model", "tokenizer")}
    elif context.config.default_model_filename and not path.exists():
        raise NotFoundError(f"{what}: no file {path}")
    parameters = {**described, **context.config.parameters}
    try:
        _check_files(what, place)
        checkpoint = open_checkpoint(place)
        entries = checkpoint.config
    except InvalidArgumentError as error:
        raise ConfigError(f"{what}: {error.message}") from None
    if parameters.get("max_model_len") == str(longest_of(checkpoint)):
        del parameters["max_model_len"]  # completed from the checkpoint, or as good as that: it is not a demand
    try:
        options = EngineOptions.from_parameters(parameters, others=_OTHER_PARAMETERS)
    except InvalidArgumentError as error:
        raise ConfigError(f"{what}: {error.message}") from None
    has_encoder = is_encoder(entries, checkpoint)
    if has_encoder:
        check_purpose(entries, checkpoint)
        read_layout(checkpoint, default="mean").prompt(options.default_prompt_name)
    return CheckpointPlace(checkpoint, options, has_encoder)


def longest_of(checkpoint: Checkpoint) -> int | None:
    """The positions that the checkpoint was made for, of an encoder the length that it is used with; None if its
    config.json does not say."""
    entries = checkpoint.config
    if is_encoder(entries, checkpoint):
        return usual_len(entries, checkpoint)
    for key in ("max_position_embeddings", "n_positions", "n_ctx"):
        for place in (entries, entries.get("text_config")):
            if isinstance(place, dict) and isinstance(place.get(key), int):
                return int(place[key])
    return None


def _read(what: str, path: Path) -> dict[str, Any]:
    try:
        described = parse_json(path.read_text(), f"{what}: {path}")
    except (ValueError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what}: {path} is not JSON: {error}") from None
    if not isinstance(described, dict):
        raise ConfigError(f"{what}: {path}: expected a JSON object, got {type(described).__name__}")
    return described


def _named_place(what: str, path: Path, described: Mapping[str, Any]) -> Path:
    """A directory, or a GGUF file."""
    name = described.get("model")
    if name is None:
        return path.parent
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{what}: {path}: 'model': expected the path of a directory, got {name!r:.80}")
    place = path.parent / Path(name).expanduser()
    if is_gguf(place):
        if not place.is_file():
            raise NotFoundError(f"{what}: {path}: 'model': there is no file {place}")
        return place
    if place.is_dir():
        return place
    cache = _hub_cache(described)
    snapshot = _snapshot(cache, name, str(described.get("revision") or "main"))
    if snapshot is None:
        raise NotFoundError(
            f"{what}: {path}: 'model': there is no directory {place}, and no downloaded model of that name and "
            f"revision in {cache}. Nothing is downloaded: get it by 'hf download {name}', as the user that the server "
            "runs as, or put the checkpoint into a directory, and name that"
        )
    return snapshot


def _hub_cache(described: Mapping[str, Any]) -> Path:
    """Where Hugging Face's tools keep what they download; vLLM's `download_dir` names another place."""
    if named := described.get("download_dir") or os.environ.get("HF_HUB_CACHE"):
        return Path(str(named)).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home, "hub").expanduser()


def _snapshot(cache: Path, name: str, revision: str) -> Path | None:
    """The files of a model of the hub, such as "facebook/opt-125m", at a branch, tag or commit; None if not there."""
    if not _HUB_NAME.fullmatch(name) or ".." in Path(revision).parts:
        return None
    repository = cache / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / revision
    snapshot = repository / "snapshots" / (reference.read_text().strip() if reference.is_file() else revision)
    is_there = (snapshot / CONFIG_JSON).is_file() or any(snapshot.glob(GGUF_FILES))
    return snapshot if is_there else None


def _check_tokenizer(what: str, path: Path, described: Mapping[str, Any], place: Path) -> None:
    """vLLM takes a tokenizer from another place; here it is the checkpoint's own."""
    name = described.get("tokenizer")
    if name in (None, described.get("model")):
        return
    if not isinstance(name, str) or (path.parent / Path(name).expanduser()).resolve() != place.resolve():
        advice = (
            "a GGUF file has a tokenizer of its own"
            if is_gguf(place)
            else "copy tokenizer.json and tokenizer_config.json into the checkpoint's directory"
        )
        raise ConfigError(
            f"{what}: {path}: 'tokenizer': expected the directory of 'model', or nothing, got {name!r:.80}; {advice}"
        )


def _check_files(what: str, place: Path) -> None:
    if is_gguf(place) or (place / CONFIG_JSON).is_file() or find_gguf(place) is not None:
        return
    names = ", ".join(sorted(path.name for path in place.iterdir())[:10]) or "nothing"
    raise NotFoundError(
        f"{what}: {place} holds no {CONFIG_JSON} (there is {names}); expected a checkpoint in the layout of "
        "Hugging Face (config.json, *.safetensors, tokenizer.json), a GGUF file, or a "
        f"{MODEL_JSON} whose 'model' names one of these"
    )
