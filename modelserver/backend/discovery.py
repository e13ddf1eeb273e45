"""Backend name -> Backend class, and version directory -> backend name.

Nothing heavy is imported before a model asks for it: what must be known earlier about the bundled backends
is in one table. Looked up in this order: the model's own directory (only when the caller passes it), the
`--backend-directory`s (`<name>.py`, `<name>/__init__.py` or `<name>/model.py`), the bundled
`modelserver_backends`, entry points in the group `modelserver.backends`, Triton's names of bundled ones.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from modelserver.backend import Backend
from modelserver.config.modelfile import FILENAME as MODELFILE
from modelserver.errors import InternalError, InvalidArgumentError, NotFoundError, UnavailableError

# Python code that an operator or a model brings is found by name in a directory, and imported by its path. The names of
# such modules begin so.
EXTERNAL_PREFIX = "modelserver_external_"
# Two loads may want the same module at once; it must be executed once.
_lock = threading.RLock()


def find_source(directory: Path, name: str) -> Path | None:
    """The file that defines `name` in `directory`: a package or a single module."""
    for path in (directory / name / "__init__.py", directory / f"{name}.py"):
        if path.is_file():
            return path.resolve()
    return None


class SourceLoader(SourceFileLoader):
    """Compiles the file whenever it is imported, and writes nothing beside it.

    Python takes bytecode for that of a file if time in seconds and size agree: a file that is replaced at once would
    not be seen.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def import_source(name: str, source: Path) -> ModuleType:
    """The module at `source`, under a name of its own so that equal names in two directories do not meet.

    It is executed the first time. Raises what its code raises, and then it is as if it had never been imported.
    """
    digest = hashlib.sha256(str(source).encode()).hexdigest()[:12]
    module_name = f"{EXTERNAL_PREFIX}{re.sub(r'[^A-Za-z0-9_]', '_', name)}_{digest}"
    with _lock:
        if module_name in sys.modules:
            return sys.modules[module_name]
        locations = [str(source.parent)] if source.name == "__init__.py" else None
        loader = SourceLoader(module_name, str(source))
        spec = importlib.util.spec_from_file_location(
            module_name, source, loader=loader, submodule_search_locations=locations
        )
        assert spec is not None, "its loader is given"
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            loader.exec_module(module)
        except BaseException:
            for loaded in [other for other in sys.modules if other.split(".")[0] == module_name]:
                del sys.modules[loaded]
            raise
        return module


ENTRY_POINT_GROUP = "modelserver.backends"
_BUNDLED_PACKAGE = "modelserver_backends"
_TABULAR = f"{_BUNDLED_PACKAGE}.tabular"
# A directory with this file is a backend too: the file is the Python model of all its models.
_PYTHON_BASED = "model.py"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Bundled:
    """What is known about a bundled backend without importing it; a test compares it with the classes.

    `filenames` are the files in a version directory by which a model is recognised.
    """

    filenames: tuple[str, ...] = ()
    library: str | None = None
    extra: str | None = None
    module: str = ""  # where it is, if not among the bundled packages


BUNDLED = {
    "function": Bundled(module="modelserver.embed.backend"),
    "identity": Bundled(),
    "remote": Bundled(module="modelserver.remote"),
    "repeat": Bundled(),
    "sequence": Bundled(),
    "square": Bundled(),
    # Before ONNX Runtime: where a plan lies, an ONNX file beside it is what it was built from.
    "tensorrt": Bundled(("model.plan",), "torch", "tensorrt"),
    "onnxruntime": Bundled(("model.onnx",), "onnxruntime", "onnx"),
    "python": Bundled(("model.py",)),
    "pytorch": Bundled(("model.pt", "model.pt2"), "torch", "pytorch"),
    "openvino": Bundled(
        ("model.xml", "model.tflite", "saved_model.pb", "model.savedmodel", "model.pdmodel"), "openvino", "openvino"
    ),
    "tensorflow": Bundled((), "tensorflow", "tensorflow"),
    # Before the backends whose files its directories hold.
    "mlflow": Bundled(("MLmodel",), "sklearn", "classical", f"{_TABULAR}.mlflow"),
    "sklearn": Bundled(
        ("model.skops", "model.joblib", "model.pkl", "model.pickle"), "sklearn", "classical", f"{_TABULAR}.sklearn"
    ),
    "xgboost": Bundled(("model.ubj", "model.json", "model.bst"), "xgboost", "classical", f"{_TABULAR}.xgboost"),
    "lightgbm": Bundled(("model.txt", "model.bst"), "lightgbm", "classical", f"{_TABULAR}.lightgbm"),
    "catboost": Bundled(("model.cbm", "model.cb", "model.json"), "catboost", "catboost", f"{_TABULAR}.catboost"),
    "fil": Bundled((), "xgboost", "classical", f"{_TABULAR}.fil"),
    "diffusers": Bundled(("model_index.json",), "diffusers", "diffusers"),
    "transformers": Bundled(("config.json",), "transformers", "transformers"),
    # Last, because models of others have a config.json too.
    "llm": Bundled(("model.json", "config.json", "*.gguf", MODELFILE), "torch", "llm"),
}
# Triton's names of backends whose models a bundled one serves, unless a backend of that name is installed.
_ALIASES = {"vllm": "llm"}

# Two loads may want the same backend at once; its module must be executed once.
_import_lock = threading.RLock()


@dataclass(frozen=True, slots=True)
class BackendListing:
    """A backend that can be named in a config: where it comes from, and which library it lacks (None: none)."""

    name: str
    source: str
    missing_library: str | None = None
    extra: str | None = None


def find_backend(
    name: str, *, backend_directories: Sequence[Path] = (), model_directory: Path | None = None
) -> type[Backend]:
    """The class that serves `backend: "<name>"`; imports it the first time.

    `model_directory` is searched too when given: pass it only if models may bring their own code.
    Raises NotFoundError for an unknown name, UnavailableError when an optional library is not installed,
    InternalError when the backend's own code cannot be imported.
    """
    if not _NAME.fullmatch(name):
        raise InvalidArgumentError(f"backend name '{name}' must consist of letters, digits, '_', '-' and '.'")
    directories = [*([model_directory] if model_directory else []), *backend_directories]
    for directory in directories:
        source = find_source(directory, name)
        if source is not None:
            return _checked(name, str(source), _import_source(name, source))
        model = directory / name / _PYTHON_BASED
        if model.is_file():
            return _python_based(model.resolve())
    if name in BUNDLED:
        module_name = BUNDLED[name].module or f"{_BUNDLED_PACKAGE}.{name}"
        return _checked(name, module_name, _import_module(name, module_name))
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name):
        return _checked(name, f"entry point {entry_point.value}", _load_entry_point(name, entry_point))
    if name in _ALIASES:
        return find_backend(_ALIASES[name])
    raise _unknown_backend(name, backend_directories, directories)


def bundled_module(backend: str, module: str) -> ModuleType:
    """A module of a bundled backend that the server itself uses, such as the chat templates of `llm`.

    Raises UnavailableError when a library that it needs is not installed.
    """
    try:
        return importlib.import_module(f"{_BUNDLED_PACKAGE}.{backend}.{module}")
    except ModuleNotFoundError as error:
        extra = BUNDLED[backend].extra
        raise UnavailableError(
            f"the Python package '{error.name}' is not installed: pip install 'modelserver-py[{extra}]'"
        ) from error


def list_backends(backend_directories: Sequence[Path] = ()) -> tuple[BackendListing, ...]:
    """Every backend by name, the one that `find_backend` would take; imports none of them."""
    listings: dict[str, BackendListing] = {}
    for listing in _all_listings(backend_directories):
        listings.setdefault(listing.name, listing)
    return tuple(sorted(listings.values(), key=lambda listing: listing.name))


def _all_listings(backend_directories: Sequence[Path]) -> Iterator[BackendListing]:
    for directory in backend_directories:
        for path in sorted(directory.glob("*")):
            if _NAME.fullmatch(path.stem) and (
                find_source(directory, path.stem) is not None or (path / _PYTHON_BASED).is_file()
            ):
                yield BackendListing(path.stem, str(directory))
    for name, bundled in BUNDLED.items():
        missing = bundled.library if bundled.library and importlib.util.find_spec(bundled.library) is None else None
        yield BackendListing(name, "bundled", missing, bundled.extra if missing else None)
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        distribution = entry_point.dist.name if entry_point.dist is not None else entry_point.value
        yield BackendListing(entry_point.name, f"entry point of {distribution}")
    for alias, name in _ALIASES.items():
        bundled = BUNDLED[name]
        missing = bundled.library if bundled.library and importlib.util.find_spec(bundled.library) is None else None
        yield BackendListing(alias, f"bundled, as {name}", missing, bundled.extra if missing else None)


@functools.cache
def _python_based(model: Path) -> type[Backend]:
    """The backend whose models are served by the Python model at `model`, as Triton's Python-based backends are."""
    made = _import_module("python", f"{_BUNDLED_PACKAGE}.python").python_based(model)
    return _checked(model.parent.name, str(model), made)


def _import_source(name: str, source: Path) -> ModuleType:
    try:
        return import_source(name, source)
    except (ImportError, OSError, SyntaxError) as error:
        raise _broken(name, str(source), error) from error


def _import_module(name: str, module_name: str) -> ModuleType:
    with _import_lock:
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            bundled = BUNDLED[name]
            if bundled.library is not None and (error.name or "").split(".")[0] == bundled.library:
                raise UnavailableError(
                    f"backend '{name}' needs the Python package '{bundled.library}', which is not installed: "
                    f"pip install 'modelserver-py[{bundled.extra}]'"
                ) from error
            raise _broken(name, module_name, error) from error
        except (ImportError, OSError, SyntaxError) as error:
            raise _broken(name, module_name, error) from error


def _load_entry_point(name: str, entry_point: importlib.metadata.EntryPoint) -> object:
    """What the entry point names: a module that holds `BACKEND`, or the class itself."""
    with _import_lock:
        try:
            return entry_point.load()
        except (ImportError, AttributeError, OSError, SyntaxError) as error:
            raise _broken(name, f"entry point {entry_point.value}", error) from error


def _checked(name: str, source: str, loaded: object) -> type[Backend]:
    """`BACKEND` of a module, or `loaded` itself, if it is a Backend class."""
    candidate = getattr(loaded, "BACKEND", None) if isinstance(loaded, ModuleType) else loaded
    if isinstance(candidate, type) and issubclass(candidate, Backend):
        return candidate
    found = "nothing of that name" if candidate is None else repr(candidate)
    raise InternalError(
        f"backend '{name}' from {source}: expected a module-level name BACKEND holding a subclass of "
        f"modelserver.backend.Backend, found {found}"
    )


def _broken(name: str, source: str, error: Exception) -> InternalError:
    return InternalError(f"backend '{name}' from {source} cannot be imported: {type(error).__name__}: {error}")


def _unknown_backend(name: str, backend_directories: Sequence[Path], searched: Sequence[Path]) -> NotFoundError:
    available = [listing.name for listing in list_backends(backend_directories)]
    near = difflib.get_close_matches(name, available, n=1, cutoff=0.5)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    places = [*map(str, searched), "the bundled backends", f"entry points '{ENTRY_POINT_GROUP}'"]
    return NotFoundError(
        f"unknown backend '{name}'{hint} Available: {', '.join(available)}. Looked in: {', '.join(places)}"
    )
