"""Models by Ollama's names: the lists of them, what each of them is, and how long each stays in memory."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from modelserver.auth.access import ApiGroup
from modelserver.backend.discovery import bundled_module
from modelserver.config.modelfile import Modelfile
from modelserver.errors import NotFoundError, ServerError
from modelserver.frontends.llm.edge import Call
from modelserver.frontends.llm.errors import Fault, ParameterError, UnknownModelError
from modelserver.frontends.llm.fields import Fields
from modelserver.frontends.llm.models import LanguageModel, find_model, known_models
from modelserver.frontends.llm.pictures import IMAGE
from modelserver.frontends.llm.prompts import find_modelfile
from modelserver.planes.authorized import AnyControlPlane, AnyDataPlane
from modelserver.store.store import Store

logger = logging.getLogger(__name__)

Document = dict[str, Any]

# The tag of a name without one. Models here have no other tags.
_TAG = ":latest"
# For models that are never unloaded, as Ollama has it: some 290 years from now.
_NEVER = "2318-01-01T00:00:00Z"


class OllamaModels:
    """Finds models for calls, and serves the routes that describe them."""

    def __init__(self, dataplane: AnyDataPlane, controlplane: AnyControlPlane) -> None:
        self._dataplane = dataplane
        self._controlplane = controlplane

    async def find(self, fields: Fields, use: str = "generates") -> LanguageModel:
        """The model that a request names, with or without the tag `latest`, in upper or lower case.

        Raises UnknownModelError, ParameterError for a model of another kind, and as the data plane does for one that is
        not ready.
        """
        asked = _asked_name(fields)
        name = asked.removesuffix(_TAG)
        try:
            return await find_model(self._dataplane, name, use)
        except UnknownModelError:
            for model in await known_models(self._dataplane):
                if model.name != name and model.name.lower() == name.lower():
                    return await find_model(self._dataplane, model.name, use)
            known = ", ".join(model.name for model in await known_models(self._dataplane)) or "none"
            raise UnknownModelError(f"model '{asked:.200}' not found; the language models here are: {known}") from None

    def keep(self, call: Call, name: str, keep_alive_s: float | None) -> None:
        """Keep a model on demand in memory for this many seconds after its last request.

        Other models stay in any case, and so they do for a client whose key may not change that.
        """
        if not keep_alive_s:
            return
        try:
            call.check_access(ApiGroup.MODEL_REPOSITORY)
            self._controlplane.keep(name, keep_alive_s)
        except ServerError as error:
            logger.debug("keep_alive of model '%s' has no effect: %s", name, error.message)

    async def evict(self, call: Call, name: str) -> None:
        """Unload a model on demand after a request with `keep_alive` 0; others stay, as with `keep`."""
        with suppress(ServerError):
            call.check_access(ApiGroup.MODEL_REPOSITORY)
            await self._controlplane.unload(name, {"evict": True})

    async def unload(self, call: Call) -> str:
        """Unload the model that a request names, which later requests load again. Returns its name as it was asked.

        Raises PermissionDeniedError for a client that may not unload models, NotFoundError for an unknown model, and
        what the control plane says of one that cannot be unloaded.
        """
        call.check_access(ApiGroup.MODEL_REPOSITORY)
        asked = _asked_name(call.fields)
        name = asked.removesuffix(_TAG)
        if all(model.name != name for model in await known_models(self._dataplane)):
            raise NotFoundError(f"model '{asked:.200}' not found")
        await self._controlplane.unload(name, {"evict": True})
        return asked

    async def tags(self) -> Document:
        """`GET /api/tags`: all language models, in memory or not."""
        models = [model for model in await known_models(self._dataplane) if model.generates or model.embeds]
        return {"models": [_summary(model, await self._files(model)) for model in models]}

    async def running(self) -> Document:
        """`GET /api/ps`: the language models in memory."""
        ready = set(self._dataplane.model_names())
        known = await known_models(self._dataplane)
        models = [model for model in known if model.name in ready and (model.generates or model.embeds)]
        return {"models": [_running(model, await self._files(model)) for model in models]}

    async def show(self, call: Call) -> None:
        """`POST /api/show`: what a model is. Raises ServerError."""
        fields = call.fields
        model = await self.find(fields, "is_served")
        files = await self._files(model)
        modelfile = files.modelfile or Modelfile(sources=(_tagged(model),))
        texts = {
            "license": "\n".join(modelfile.licenses),
            "system": modelfile.system or "",
            "messages": list(modelfile.messages),
        }
        call.answer(
            {
                **{name: text for name, text in texts.items() if text},
                "modelfile": f"# To build on this model, let FROM be:\n# FROM {_tagged(model)}\n\n{modelfile.text()}",
                "parameters": _parameter_lines(modelfile),
                "template": files.checkpoint.template if modelfile.template is None else modelfile.template,
                "details": _details(files),
                "model_info": _model_info(model, files),
                "capabilities": _capabilities(model),
                "modified_at": files.modified_at,
            }
        )

    async def _files(self, model: LanguageModel) -> ModelFiles:
        directories: tuple[Path, ...] = ()
        with suppress(ServerError):  # a model that is not in memory
            directories = self._dataplane.model_directories(model.name)
        store = self._dataplane.store_of(model.name)
        return await asyncio.get_running_loop().run_in_executor(None, _read_files, model, directories, store)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """The facts that clients see of a checkpoint; `config` has the entries of its config."""

    config: Mapping[str, Any] = field(default_factory=dict)
    format: str = ""
    num_parameters: int | None = None
    template: str = ""
    quantization: str = ""


_NO_CHECKPOINT = CheckpointFacts()


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model; `digest` changes with the size and the time of any of them."""

    num_bytes: int
    digest: str
    modified_at: str
    checkpoint: CheckpointFacts
    modelfile: Modelfile | None = None
    # The entries of the config of a model of the store.
    stored: Mapping[str, Any] = field(default_factory=dict)


def _asked_name(fields: Fields) -> str:
    asked = fields.text("model") or fields.text("name")
    if not asked:
        raise ParameterError("model is required", "model", Fault.MISSING)
    return asked


def _read_files(model: LanguageModel, directories: tuple[Path, ...], store: Store | None) -> ModelFiles:
    """Reads the directory of the newest version, which is the first one. In a thread."""
    if store is not None and (found := _read_stored(model, directories, store)) is not None:
        return found
    state = hashlib.sha256(model.name.encode())
    num_bytes, modified_s = 0, 0.0
    given = find_modelfile(model, directories)
    modelfile = given[1] if given is not None else None
    place = _place(model, directories[0], modelfile) if directories else None
    for path in sorted({*_all_files(directories[:1]), *([] if place is None else _all_files([place]))}):
        try:
            status = path.stat()
        except OSError:  # removed meanwhile
            continue
        num_bytes += status.st_size
        modified_s = max(modified_s, status.st_mtime)
        state.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    digest = state.hexdigest()
    described = _describe_checkpoint(place, digest) if place is not None else _NO_CHECKPOINT
    return ModelFiles(num_bytes, digest, _time_text(modified_s), described, modelfile)


def _place(model: LanguageModel, directory: Path, modelfile: Modelfile | None) -> Path:
    """The file or the directory with the weights of a version."""
    if modelfile is not None:
        return directory / modelfile.source
    if model.filename.endswith(".gguf"):
        return directory / model.filename
    try:
        named = orjson.loads((directory / (model.filename or "model.json")).read_bytes())["model"]
        return directory / Path(named).expanduser()
    except (OSError, ValueError, LookupError, TypeError):
        return directory


def _read_stored(model: LanguageModel, directories: tuple[Path, ...], store: Store) -> ModelFiles | None:
    """What the manifest of a model of the store says, in memory or not; None for any other model."""
    try:
        stored = store.find(model.shown_name)
        described = store.describe(model.shown_name)
    except ServerError:
        return None
    digest = stored.manifest.digest.removeprefix("sha256:")
    modelfile = Modelfile(
        sources=(str(stored.name),),
        template=described.template,
        system=described.system,
        parameters=described.parameters,
        messages=described.messages,
        licenses=tuple(described.licenses),
    )
    checkpoint = _describe_checkpoint(_weights(directories[0]), digest) if directories else _NO_CHECKPOINT
    return ModelFiles(
        stored.manifest.size_bytes, digest, _time_text(stored.modified_s), checkpoint, modelfile, described.config
    )


def _weights(directory: Path) -> Path:
    """What the view of a stored model shows as its weights."""
    path = directory / "model.gguf"
    return path if path.exists() else directory


def _time_text(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat().replace("+00:00", "Z")


@lru_cache(maxsize=256)
def _describe_checkpoint(directory: Path, _digest: str) -> CheckpointFacts:
    """Clients ask for the list of models again and again: a checkpoint is read once for each state of its files."""
    module = bundled_module("llm", "checkpoint")
    try:
        with module.open_checkpoint(directory) as checkpoint:
            is_gguf = module.is_gguf(checkpoint.place)
            return CheckpointFacts(
                config=checkpoint.config,
                format="gguf" if is_gguf else "safetensors",
                num_parameters=sum(math.prod(checkpoint.shape(each)) for each in checkpoint.names()),
                template=checkpoint.chat_templates.get("default", ""),
                quantization=checkpoint.file_type if is_gguf else _quantization(checkpoint.config),
            )
    except (ServerError, OSError):
        return _NO_CHECKPOINT


def _all_files(directories: Iterable[Path]) -> Iterable[Path]:
    for directory in directories:
        if directory.is_file():
            yield directory
        yield from (path for path in directory.rglob("*") if path.is_file())


def _tagged(model: LanguageModel) -> str:
    """The name of a model with its tag."""
    name = model.shown_name
    return name if ":" in name.rpartition("/")[2] else name + _TAG


def _summary(model: LanguageModel, files: ModelFiles) -> Document:
    return {
        "name": _tagged(model),
        "model": _tagged(model),
        "modified_at": files.modified_at,
        "size": files.num_bytes,
        "digest": files.digest,
        "details": _details(files),
        "capabilities": _capabilities(model),
    }


def _running(model: LanguageModel, files: ModelFiles) -> Document:
    summary = _summary(model, files)
    del summary["modified_at"], summary["capabilities"]
    return summary | {
        "expires_at": _NEVER,
        "size_vram": 0,
        "context_length": model.max_model_len or _context_length(files) or 0,
    }


def _details(files: ModelFiles) -> Document:
    """By the weights, as far as they are known; those of a model of the store that is not loaded, by its config."""
    family = str(files.checkpoint.config.get("model_type", "")) or _text(files.stored, "model_family")
    size = _size_text(files.checkpoint.num_parameters)
    return {
        "parent_model": "",
        "format": files.checkpoint.format or _text(files.stored, "model_format"),
        "family": family,
        "families": [family] if family else [],
        "parameter_size": size or _text(files.stored, "model_type"),
        "quantization_level": _text(files.stored, "file_type") or files.checkpoint.quantization,
    }


def _text(entries: Mapping[str, Any], name: str) -> str:
    value = entries.get(name)
    return value if isinstance(value, str) else ""


def _size_text(num_parameters: int | None) -> str:
    """Such as "596.05M", as Ollama has it."""
    if num_parameters is None:
        return ""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if num_parameters >= size:
            return f"{num_parameters / size:.{1 if unit == 'B' else 2}f}{unit}"
    return str(num_parameters)


def _quantization(config: Mapping[str, Any]) -> str:
    quantized = config.get("quantization_config")
    if isinstance(quantized, dict):
        return str(quantized.get("quant_method", ""))
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
    return {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}.get(dtype, dtype)


def _context_length(files: ModelFiles) -> int | None:
    value = files.checkpoint.config.get("max_position_embeddings")
    return value if isinstance(value, int) else None


def _model_info(model: LanguageModel, files: ModelFiles) -> Document:
    """By the names of GGUF's metadata, which clients read."""
    config = files.checkpoint.config
    family = str(config.get("model_type", "unknown"))
    info: Document = {"general.architecture": family, "general.basename": model.name}
    if files.checkpoint.num_parameters is not None:
        info["general.parameter_count"] = files.checkpoint.num_parameters
    names = {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "vocab_size": "vocab_size",
    }
    info |= {f"{family}.{ours}": config[theirs] for ours, theirs in names.items() if theirs in config}
    if model.max_model_len is not None:
        info[f"{family}.context_length"] = model.max_model_len
    return info


def _parameter_lines(modelfile: Modelfile) -> str:
    """A parameter a line, its value as Go writes it."""
    lines = []
    for name, value in modelfile.parameters.items():
        values = value if isinstance(value, list) else [value]
        lines += [f"{name:<30} {orjson.dumps(each).decode()}" for each in values]
    return "\n".join(lines)


def _capabilities(model: LanguageModel) -> list[str]:
    found = {
        "completion": model.generates,
        "embedding": model.embeds and not model.generates,
        "vision": model.generates and IMAGE in model.inputs,
        "tools": model.generates and bool(model.tool_parser),
        "thinking": model.generates and bool(model.reasoning_parser),
        "insert": "suffix" in model.inputs or model.fills_in_middle,
    }
    return [name for name, has in found.items() if has]
