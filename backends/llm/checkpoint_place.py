"""Where a model's checkpoint lies, and its engine options: version directory, model.json or Modelfile, config.pbtxt."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelserver.backend import (
    BackendContext,
    ConfigError,
    InvalidArgumentError,
    Modelfile,
    NotFoundError,
    UnsupportedError,
    is_modelfile,
    parse_json,
    read_modelfile,
)

from .checkpoint import Checkpoint, find_gguf, is_gguf, is_projector, open_checkpoint
from .contract import LABELS, Purpose
from .embedding.layout import read_layout
from .embedding.recognition import is_encoder, labels_of, purpose_of, usual_len
from .engines import ENGINES, OtherEngine
from .lora.places import find_adapters
from .nodes import Nodes
from .options import EngineOptions
from .speculation.config import WITH_MODEL
from .text.ollama_template import OllamaTemplate

logger = logging.getLogger(__name__)

MODEL_JSON = "model.json"
MODELFILE = "Modelfile"
# The parameter that says how a model fills in the middle of a text: "template" is by its Modelfile's template.
FILL_IN_MIDDLE = "fill_in_middle"
CONFIG_JSON = "config.json"
# The key of model.json that names an engine in the place of ours, and those of our options that count for it.
ENGINE = "engine"
_COMMON_OPTIONS = (
    "max_model_len",
    "max_num_seqs",
    "max_logprobs",
    "scheduling_policy",
    "tensor_parallel_size",
    "disable_any_whitespace",
    "enable_lora",
    "lora_modules",
    "max_loras",
    "max_lora_rank",
)
GGUF_FILES = "*.gguf"
_HUB_NAME = re.compile(r"([A-Za-z0-9_][\w.-]*/)?[A-Za-z0-9_][\w.-]*", re.ASCII)
# Parameters of config.pbtxt that are the server's, a frontend's, or of Triton's vLLM backend without an effect here.
_OTHER_PARAMETERS = frozenset(
    {
        "tool_parser",
        "reasoning_parser",
        FILL_IN_MIDDLE,
        LABELS,
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
        "EXECUTE_TIMEOUT_SECONDS",
        "START_TIMEOUT_SECONDS",
    }
)


@dataclass(frozen=True, slots=True)
class CheckpointPlace:
    """`options` come from model.json or the Modelfile, and config.pbtxt over it. `template` is the Modelfile's.

    `labels` are those of a classifier. `engine` is one in the place of ours.
    """

    checkpoint: Checkpoint
    options: EngineOptions
    purpose: Purpose
    labels: tuple[str, ...] = ()
    modelfile: Modelfile | None = None
    template: OllamaTemplate | None = None
    engine: OtherEngine | None = None


def find_checkpoint(context: BackendContext) -> CheckpointPlace:
    """Raises NotFoundError with the places looked at, ConfigError for options that are wrong, and what
    `embedding.layout` and `embedding.recognition` say of an encoder that cannot be served."""
    path = context.version_directory / (context.config.default_model_filename or MODEL_JSON)
    if path.name == MODEL_JSON and path.is_file():
        what = f"model '{context.model_name}' version {context.version}"
        described = _read(what, path)
        if ENGINE in described or ENGINE in context.config.parameters:
            return _place_of_other_engine(what, path, described, context)
    place = _place_of_ours(context)
    if place.options.tensor_parallel_size == 1 or place.purpose is not Purpose.GENERATE:
        return place
    return replace(place, options=replace(place.options, nodes=Nodes.of(context)))


def _place_of_ours(context: BackendContext) -> CheckpointPlace:
    version_directory = context.version_directory
    what = f"model '{context.model_name}' version {context.version}"
    path = version_directory / (context.config.default_model_filename or _description(what, version_directory))
    described: Mapping[str, Any] = {}
    modelfile: Modelfile | None = None
    place = version_directory
    if path.is_file() and is_gguf(path):
        place = path
    elif path.is_file() and is_modelfile(path):
        modelfile = _read_modelfile(what, path)
        place = _model_of(what, path, modelfile, context)
        described = _engine_options(modelfile)
        if modelfile.drafts:
            (text,) = modelfile.drafts
            described["speculative_config"] = _drafting(
                modelfile, _part(what, path, f"DRAFT {text:.200}", text, context)
            )
    elif path.is_file() and path.name != CONFIG_JSON:
        described = _read(what, path)
        place = _named_place(what, path, described)
        _check_tokenizer(what, path, described, place)
        described = _with_draft_place(what, path, described)
        described = {name: value for name, value in described.items() if name not in ("model", "tokenizer")}
    elif context.config.default_model_filename and not path.exists():
        raise NotFoundError(f"{what}: no file {path}")
    parameters = {**described, **context.config.parameters}
    try:
        _check_files(what, place)
        checkpoint = open_checkpoint(place)
        entries = checkpoint.config
        longest = longest_of(checkpoint)
        template = OllamaTemplate(modelfile.template) if modelfile is not None and modelfile.template else None
    except InvalidArgumentError as error:
        raise ConfigError(f"{what}: {error.message}") from None
    if longest is not None and modelfile is not None and int(parameters.get("max_model_len") or 0) > longest:
        del parameters["max_model_len"]  # a Modelfile's num_ctx may be more than the model has
    if parameters.get("max_model_len") == str(longest):
        del parameters["max_model_len"]  # completed from the checkpoint, or as good as that: it is not a demand
    try:
        options = EngineOptions.from_parameters(parameters, others=_OTHER_PARAMETERS)
    except InvalidArgumentError as error:
        raise ConfigError(f"{what}: {error.message}") from None
    from_tokens = options.classifier_from_token
    purpose = purpose_of(entries, checkpoint, is_from_tokens=from_tokens is not None)
    options = _with_adapters(what, context, options, modelfile, path.parent, purpose)
    labels: tuple[str, ...] = ()
    if purpose is Purpose.EMBED:
        read_layout(checkpoint, default="mean").prompt(options.default_prompt_name)
    elif purpose is not Purpose.GENERATE:
        labels = tuple(labels_of(entries, checkpoint, from_tokens))
    return CheckpointPlace(checkpoint, options, purpose, labels, modelfile, template)


def _place_of_other_engine(
    what: str, path: Path, described: Mapping[str, Any], context: BackendContext
) -> CheckpointPlace:
    """Our part of the checkpoint is its config, tokenizer and template: those of `tokenizer`, if model.json has one.

    Everything in model.json that is not ours is an argument of the engine.
    """
    written = {
        **described,
        **{
            key: context.config.parameters[key]
            for key in (ENGINE, *_COMMON_OPTIONS)
            if key in context.config.parameters
        },
    }
    name = written[ENGINE]
    if context.is_uploaded:
        raise ConfigError(f"{what}: {path}: '{ENGINE}' is of models of the repository: its arguments may run code")
    if name not in ENGINES:
        raise ConfigError(f"{what}: {path}: '{ENGINE}': expected {', '.join(ENGINES)}, or nothing, got {name!r:.80}")
    model = described.get("model")
    if not isinstance(model, str) or not model:
        raise ConfigError(
            f"{what}: {path}: 'model': expected a directory, or a name that {name} knows, got {model!r:.80}"
        )
    given = {key: written[key] for key in _COMMON_OPTIONS if key in written}
    try:
        place = _named_place(what, path, {**described, "model": described.get("tokenizer", model)})
        _check_files(what, place)
        checkpoint = open_checkpoint(place)
        options = EngineOptions.from_parameters(given)
        longest = options.max_model_len or longest_of(checkpoint)
        if longest is None:
            raise ConfigError(f"{what}: {path}: set max_model_len: {place} does not say how long texts may be")
        options = replace(options, max_model_len=longest)
    except InvalidArgumentError as error:
        raise ConfigError(f"{what}: {error.message}") from None
    options = _with_adapters(what, context, options, None, path.parent, Purpose.GENERATE)
    own = path.parent / Path(model).expanduser()
    ours = {ENGINE, "model", "tokenizer", *_COMMON_OPTIONS, *_OTHER_PARAMETERS}
    arguments = {key: value for key, value in described.items() if key not in ours}
    engine = OtherEngine(str(name), str(own) if own.exists() else model, arguments)
    return CheckpointPlace(checkpoint, options, Purpose.GENERATE, engine=engine)


def _with_adapters(
    what: str,
    context: BackendContext,
    options: EngineOptions,
    modelfile: Modelfile | None,
    directory: Path,
    purpose: Purpose,
) -> EngineOptions:
    """The options with all adapters of the model's files. Those of a Modelfile are of all its requests.

    Raises ConfigError for what this model, or one that comes with a request, cannot have.
    """
    if context.is_uploaded and (options.kept_prefixes or options.kv_events_config is not None):
        raise ConfigError(
            f"{what}: kept_prefixes and kv_events_config are of models of the repository, as they write files and open "
            "ports: leave them out"
        )
    if purpose is not Purpose.GENERATE and options.serves_adapters:
        raise ConfigError(f"{what}: adapters are of models that generate: remove enable_lora and lora_modules")
    if options.enable_lora is False or purpose is not Purpose.GENERATE:
        return options
    listed = dict(options.lora_modules)
    usual = {f"adapter-{number}": text for number, text in enumerate(modelfile.adapters if modelfile else ())}
    if usual:
        listed |= {name: str(directory / Path(text).expanduser()) for name, text in usual.items()}
    places = find_adapters(what, context.version_directory, listed, is_confined=context.is_uploaded)
    if context.model_name in places:
        raise ConfigError(f"{what}: an adapter must not be called as its model is: rename {places[context.model_name]}")
    modules = tuple((name, str(place)) for name, place in places.items())
    for name in options.usual_adapters:
        if name not in places:
            raise ConfigError(f"{what}: usual_adapters: there is no adapter '{name:.100}'; there are {sorted(places)}")
    return replace(options, lora_modules=modules, usual_adapters=tuple(usual) or options.usual_adapters)


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


def _description(what: str, directory: Path) -> str:
    """The file of a directory that says where its checkpoint is. ConfigError where there are two."""
    if not (directory / MODELFILE).is_file():
        return MODEL_JSON
    if (directory / MODEL_JSON).is_file():
        raise ConfigError(f"{what}: {directory} holds both {MODEL_JSON} and {MODELFILE}: keep one of them")
    return MODELFILE


def _read_modelfile(what: str, path: Path) -> Modelfile:
    try:
        modelfile = read_modelfile(path)
    except InvalidArgumentError as error:
        raise ConfigError(f"{what}: {error.message}") from None
    if len(modelfile.drafts) > 1:
        raise UnsupportedError(f"{what}: {path} has several DRAFT lines: keep one draft model")
    return modelfile


def _model_of(what: str, path: Path, modelfile: Modelfile, context: BackendContext) -> Path:
    """What FROM names. Of several lines one is the model, and the others are projectors, which are passed over.

    Pictures are for checkpoints of Hugging Face only.
    """
    places = [_part(what, path, f"FROM {text:.200}", text, context) for text in modelfile.sources]
    if len(places) == 1:
        return places[0]
    try:
        models = [place for place in places if not is_projector(place)]
    except InvalidArgumentError as error:
        raise ConfigError(f"{what}: {error.message}") from None
    if len(models) != 1:
        raise UnsupportedError(f"{what}: {path} has several FROM lines: expected one model, and its projectors")
    logger.warning("%s: the projector that %s names is passed over: the model reads text only", what, path)
    return models[0]


def _part(what: str, path: Path, line: str, text: str, context: BackendContext) -> Path:
    """The checkpoint that a line names: below the model's directory, but for a Modelfile on the command line."""
    name = Path(text).expanduser()
    is_given = path.parent == context.model_directory and not context.is_uploaded
    place = Path(os.path.normpath(path.parent / name))
    root = Path(os.path.normpath(context.model_directory))
    if not place.is_relative_to(root) and not (is_given and name.is_absolute()):
        raise ConfigError(
            f"{what}: {path}: {line} is outside {root}: name a GGUF file or a directory in it. "
            "Only a Modelfile that is named on the command line may have an absolute path"
        )
    if not place.is_dir() and not (place.is_file() and is_gguf(place)):
        raise NotFoundError(f"{what}: {path}: {line}: there is no directory and no .gguf file {place}")
    return place


def _drafting(modelfile: Modelfile, place: Path) -> dict[str, Any]:
    """Speculation by a draft model, with as many tokens as the Modelfile says."""
    num_tokens = modelfile.parameters.get("draft_num_predict", 0)
    given = {"num_speculative_tokens": num_tokens} if num_tokens > 0 else {}
    return {"method": "draft_model", "model": str(place), **given}


def _engine_options(modelfile: Modelfile) -> dict[str, Any]:
    """The options of the engine among a Modelfile's parameters."""
    names = {"num_ctx": "max_model_len", "num_thread": "num_threads"}
    return {ours: modelfile.parameters[name] for name, ours in names.items() if modelfile.parameters.get(name, 0) > 0}


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


def _with_draft_place(what: str, path: Path, described: Mapping[str, Any]) -> Mapping[str, Any]:
    """A draft model is found where a model of that name would be."""
    config = described.get("speculative_config")
    if not isinstance(config, Mapping) or config.get("method", "draft_model") not in WITH_MODEL:
        return described
    if config.get("model") in (None, "ngram", "[ngram]"):
        return described
    place = _named_place(what, path, {**described, "model": config["model"], "revision": config.get("revision")})
    return {**described, "speculative_config": {**config, "model": str(place)}}


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
        "Hugging Face (config.json, *.safetensors, tokenizer.json), a GGUF file, a "
        f"{MODEL_JSON} whose 'model' names one of these, or a {MODELFILE}"
    )
