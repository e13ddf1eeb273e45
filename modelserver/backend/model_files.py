"""Which bundled backend serves a model's file or version directory: by names, and where they are shared by content."""

from __future__ import annotations

import json
import re
from pathlib import Path

from modelserver.backend import is_modelfile
from modelserver.backend.discovery import BUNDLED
from modelserver.config.modelfile import FILENAME as MODELFILE
from modelserver.errors import InvalidArgumentError

# The file that describes a language model holds a few options; other libraries' whole models have its name as well.
_DESCRIPTION, _CHECKPOINT = "model.json", "config.json"
_MLFLOW, _PIPELINE = "MLmodel", "model_index.json"
_MAX_DESCRIPTION_BYTES = 1 << 20
_HEAD_BYTES = 4096
# How the files of a kind begin whose names do not tell the kind.
_BEGINNINGS = {
    "xgboost": re.compile(rb'\{L|\s*\{\s*"(?:learner|version)"'),
    "catboost": re.compile(
        rb'CBM1|\s*\{\s*"(?:oblivious_trees|features_info|ctr_data|float_features_index|model_info)"'
    ),
    "openvino": re.compile(rb"(?:<\?xml[^>]*>\s*)?<net\b"),
    "lightgbm": re.compile(rb"tree\r?\n"),
}
# Architectures of Hugging Face that are neither language models nor encoders.
_TASKS = re.compile(
    r"WhisperForConditionalGeneration$|For(TokenClassification|QuestionAnswering|ImageClassification|ObjectDetection"
    r"|SemanticSegmentation|AudioClassification|CTC)$"
)
_SHARED_NAMES = (".json", ".txt", ".bst", ".xml")

_AS_ONNX = "convert it to ONNX, or serve it by a Python model (model.py)"
# What to do with files that no backend serves as they are, by their endings.
_WAYS_OUT = {
    ".safetensors": "these are weights alone; serve the directory of the checkpoint, which also holds its config.json, "
    "or write the module with 'modelserver convert FILE.py:CLASS DIRECTORY --to pt2 --weights FILE.safetensors'",
    ".bin": "these are weights alone; serve the directory of the checkpoint, which also holds its config.json",
    ".json": "it is not a model of XGBoost or CatBoost; serve the directory of the checkpoint or the model that it "
    "describes",
    ".xml": "it is not a model of OpenVINO, which begins with <net>",
    ".txt": "it is not a model of LightGBM, which begins with the line 'tree'",
    ".pbtxt": "serve the directory of the model, or the repository that the directory lies in",
    ".pth": "if it is TorchScript or an exported program, name it .pt or .pt2; if it holds weights alone, write the "
    "module with 'modelserver convert FILE.py:CLASS DIRECTORY --to pt2 --weights FILE.pth'",
    **dict.fromkeys((".h5", ".keras"), f"for a TensorFlow model, {_AS_ONNX}"),
    **dict.fromkeys(
        (".mlmodel", ".mlpackage"), f"Core ML runs on Apple's systems only; of the original model, {_AS_ONNX}"
    ),
}


def backend_for_model_files(version_directory: Path) -> str | None:
    """The bundled backend whose model file lies in `version_directory`, or None."""
    for name, bundled in BUNDLED.items():
        if any(_has_model_file(version_directory, filename, name) for filename in bundled.filenames):
            return name
    return None


def backend_for_model_file(path: Path) -> str:
    """The bundled backend that serves a file of this kind, whatever its name.

    Raises InvalidArgumentError for a kind that none serves, with a way to serve what it holds.
    """
    if is_modelfile(path):
        return "llm"
    kind = path.suffix.lower()
    kinds = {".ts": "pytorch"} | {
        Path(name).suffix: backend
        for backend, bundled in BUNDLED.items()
        for name in bundled.filenames
        if name not in (_DESCRIPTION, _CHECKPOINT, MODELFILE, _MLFLOW, _PIPELINE)
    }
    backend = _by_content(path) if kind in _SHARED_NAMES else kinds.get(kind)
    if backend in BUNDLED:
        return backend
    if backend is not None:
        kind = f".{backend}"
    way = _WAYS_OUT.get(kind) or f"expected a model's file ({', '.join(sorted(kinds))}) or a directory"
    raise InvalidArgumentError(f"'{path}' cannot be served: {way}")


def checkpoint_of(path: Path) -> Path | None:
    """The directory of a language model's checkpoint, of MLflow or of diffusers, if the file is its weights or its
    description."""
    if path.name in (_MLFLOW, _PIPELINE):
        return path.absolute().parent
    return path.parent if path.suffix.lower() == ".safetensors" and (path.parent / _CHECKPOINT).is_file() else None


def is_foreign_model(path: Path) -> bool:
    """Whether the file is of a kind that holds models, which no backend serves as it is."""
    return path.suffix.lower() in _WAYS_OUT.keys() - {".json", ".txt", ".xml", ".pbtxt", ".bin"}


def foreign_model_file(version_directory: Path) -> str | None:
    """What to say of a file that has the name of a backend's model file, and is another library's model."""
    path = version_directory / _DESCRIPTION
    if not path.is_file() or _describes_language_model(path):
        return None
    return (
        f"{path} does not describe a language model (it has no 'model'), and is not a model of XGBoost or CatBoost: "
        f"{_AS_ONNX}"
    )


def model_filenames() -> dict[str, tuple[str, ...]]:
    """The model file names of every bundled backend that is recognised by them."""
    return {name: bundled.filenames for name, bundled in BUNDLED.items() if bundled.filenames}


def _has_model_file(directory: Path, filename: str, backend: str) -> bool:
    """`filename` may be a pattern."""
    if "*" in filename:
        return any(directory.glob(filename))
    path = directory / filename
    if not path.exists():
        return False
    if path.name == _DESCRIPTION and backend == "llm":
        return (directory / _CHECKPOINT).exists() or _describes_language_model(path)
    if path.name == _PIPELINE:
        return True
    if path.name == _CHECKPOINT:
        return backend == "llm" or _is_of_task(path)
    return path.suffix not in _SHARED_NAMES or _by_content(path) == backend


def _by_content(path: Path) -> str | None:
    """The kind of boosted trees that a file holds."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return None
    return next((kind for kind, beginning in _BEGINNINGS.items() if beginning.match(head)), None)


def _is_of_task(path: Path) -> bool:
    """Whether a checkpoint's config names an architecture of such a task."""
    try:
        architectures = json.loads(path.read_bytes())["architectures"]
        return _TASKS.search(str(architectures[0])) is not None
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _describes_language_model(path: Path) -> bool:
    """Whether `model.json` is not another library's model: several write theirs under this name."""
    if _by_content(path) is not None:
        return False
    try:
        if path.stat().st_size > _MAX_DESCRIPTION_BYTES:
            return False
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return True  # the backend says what is wrong with it
    if not isinstance(document, dict) or "model" in document:
        return True
    return not any(isinstance(value, dict | list) for value in document.values())
