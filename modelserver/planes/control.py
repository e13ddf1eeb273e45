"""Where both protocols meet to control models: the repository index, load and unload."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelserver.config.on_demand import KEEP_ALIVE, parse_keep_alive
from modelserver.errors import InvalidArgumentError, UnsupportedError
from modelserver.planes.adapters import AdapterLoads
from modelserver.repository.namespaces import check_model_name
from modelserver.repository.repository import ModelRepository
from modelserver.repository.state import IndexEntry, ModelState
from modelserver.repository.traffic import Traffic, parse_traffic
from modelserver.store.store import Store
from modelserver.telemetry.audit import audited
from modelserver.telemetry.log_settings import LogControl

ControlParameter = bool | int | str | bytes

_CONFIG = "config"
_FILE_PREFIX = "file:"
_PERSIST = "persist"
_OVERRIDE = "override"
_VERSION = "version"
_MOST_VERSION_DIGITS = 19
_UNLOAD_DEPENDENTS = "unload_dependents"
_EVICT = "evict"
# Limits of file systems.
_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 4096
# System directories that hold no ordinary files.
_NO_MODELS = ("dev", "proc", "sys")


class ControlPlane:
    """The calls by which a frontend sees and changes which models are loaded. Event loop thread only."""

    def __init__(
        self,
        repository: ModelRepository,
        logs: LogControl | None = None,
        adapters: AdapterLoads | None = None,
    ) -> None:
        """`adapters`: those that may be loaded while models serve; None: none may."""
        self._repository = repository
        self._adapters = adapters
        self.logs = logs or LogControl()

    def index(self, ready_only: bool = False, repository_name: str = "") -> list[IndexEntry]:
        """The rows of all models, or of the ready versions, or those of one repository.

        Raises NotFoundError for an unknown repository.
        """
        rows = self._repository.index(repository_name)
        return [row for row in rows if row.state is ModelState.READY] if ready_only else rows

    async def load(
        self,
        name: str,
        parameters: Mapping[str, ControlParameter] | None = None,
        *,
        repository_name: str = "",
        version: int | None = None,
    ) -> None:
        """Load or reload a model, or with `version` (also a parameter) one version of it; returns when it serves.

        `config` is a model config as JSON that replaces the file; `file:<version>/<path>` is the content
        of a file (bytes, or base64 in a str), and together these replace the model's directory. `persist`
        keeps them for later starts; false forgets what was kept. `override` false loads the model as it is on disk,
        where a config without files would otherwise stay. `keep_alive` is how long a model on demand stays in
        memory without requests: seconds, or a duration such as 5m.
        Raises InvalidArgumentError for parameters that do not make sense, else as `ModelRepository.load`.
        """
        with audited("load", name):
            await self._load(name, parameters or {}, repository_name, version)

    async def _load(
        self, name: str, parameters: Mapping[str, ControlParameter], repository_name: str, version: int | None
    ) -> None:
        check_model_name(name)
        config_json: str | None = None
        files: dict[str, bytes] = {}
        persists: bool | None = None
        drops_override = False
        keep_alive_s: float | None = None
        for key, value in parameters.items():
            if key == _CONFIG:
                config_json = _as_text(key, value)
            elif key.startswith(_FILE_PREFIX):
                path = _as_path(key)
                if path in files:
                    raise InvalidArgumentError(f"load parameter '{key:.200}': there are two of the file '{path:.200}'")
                files[path] = _as_bytes(key, value)
            elif key == _VERSION:
                version = _as_version("load", value, version)
            elif key == _PERSIST:
                persists = _as_bool("load", key, value)
            elif key == _OVERRIDE:
                drops_override = not _as_bool("load", key, value)
            elif key == KEEP_ALIVE:
                keep_alive_s = _as_duration(key, value)
            else:
                accepted = (
                    f"'{_CONFIG}', '{_FILE_PREFIX}<version>/<path>', '{KEEP_ALIVE}', '{_OVERRIDE}', '{_PERSIST}' and "
                    f"'{_VERSION}'"
                )
                raise _unknown(key, "load", accepted)
        await self._repository.load(
            name,
            config_json=config_json,
            files=files or None,
            version=version,
            persists=persists,
            drops_override=drops_override,
            keep_alive_s=keep_alive_s,
            repository=repository_name,
        )

    async def unload(
        self,
        name: str,
        parameters: Mapping[str, ControlParameter] | None = None,
        *,
        repository_name: str = "",
        version: int | None = None,
    ) -> None:
        """Unload a model, or with `version` (also a parameter) that one of its versions.

        Returns when it takes no more requests. Unloading a model that is not loaded is not an error. With `evict` a
        model on demand is loaded again by the next request for it.
        """
        with audited("unload", name):
            await self._unload(name, parameters or {}, repository_name, version)

    async def _unload(
        self, name: str, parameters: Mapping[str, ControlParameter], repository_name: str, version: int | None
    ) -> None:
        check_model_name(name)
        unload_dependents = evicts = False
        for key, value in parameters.items():
            if key == _UNLOAD_DEPENDENTS:
                unload_dependents = _as_bool("unload", key, value)
            elif key == _EVICT:
                evicts = _as_bool("unload", key, value)
            elif key == _VERSION:
                version = _as_version("unload", value, version)
            else:
                raise _unknown(key, "unload", f"'{_EVICT}', '{_UNLOAD_DEPENDENTS}' and '{_VERSION}'")
        if unload_dependents and version is not None:
            raise InvalidArgumentError(
                f"unload parameter '{_UNLOAD_DEPENDENTS}' is about a whole model: leave out '{_VERSION}', or it"
            )
        await self._repository.unload(
            name, unload_dependents=unload_dependents, version=version, repository=repository_name, evicts=evicts
        )

    def keep(self, name: str, keep_alive_s: float) -> None:
        """Set how long a model on demand stays in memory without requests, as `ModelRepository.keep`."""
        self._repository.keep(name, keep_alive_s)

    def adapters_for(self, action: str, model: str) -> AdapterLoads:
        """The adapters that are loaded while models serve, for an action on those of a model, which is audited.

        Raises UnsupportedError where the operator has not allowed it.
        """
        with audited(f"adapter: {action}", model):
            if self._adapters is None:
                raise UnsupportedError(
                    "adapters may not be loaded while models serve: start the server with "
                    "--allow-runtime-lora-updating, or list them in lora_modules of model.json"
                )
            return self._adapters

    def store_for(self, action: str, *names: str) -> Store:
        """The model store, for an action on models of these names, or on the store itself, which is audited.

        Raises UnsupportedError for a server without one.
        """
        with audited(f"store: {action}", ", ".join(names)):
            if self._repository.store is None:
                raise UnsupportedError(
                    "this server has no model store: start it with --store=DIRECTORY to pull, create and remove "
                    "models; /v2/repository loads and unloads those of a repository"
                )
            return self._repository.store

    def traffic(self, name: str) -> Traffic | None:
        """Which versions of a model share its requests, and which see copies; None: the highest answers alone."""
        check_model_name(name)
        return self._repository.traffic.get(name)

    def traffic_shares(self, name: str) -> Mapping[int, float]:
        """The share of requests that each ready version answers now."""
        return self._repository.traffic.shares(name)

    def shadow_counts(self, name: str) -> dict[str, dict[str, int]]:
        """How copies ended since the model's traffic was set, by version and result."""
        return self._repository.traffic.counts.of(name)

    async def set_traffic(self, name: str, document: Mapping[str, Any], *, persists: bool = False) -> None:
        """Applies from the next request on. Raises InvalidArgumentError if invalid, else as `ModelRepository`."""
        with audited("traffic", name):
            await self._repository.set_traffic(name, parse_traffic(document), persists=persists)

    async def remove_traffic(self, name: str) -> None:
        """The highest version answers alone again, also after a restart."""
        with audited("traffic", name):
            await self._repository.set_traffic(name, None)

    async def add_archive(self, name: str, directory: str) -> None:
        """Load a model, or an ensemble with its models, from an absolute path of the server's machine.

        Raises InvalidArgumentError for an unusable path, else as `ModelRepository.add_archive`.
        """
        with audited("load", name):
            await self._repository.add_archive(name, _as_directory(directory))

    async def remove_archive(self, name: str) -> None:
        """Unload a model that `add_archive` loaded; returns when it is closed."""
        with audited("unload", name):
            await self._repository.remove_archive(name)

    def archives(self) -> dict[str, str]:
        """The models that `add_archive` loaded and that serve, with their paths."""
        return {name: str(path) for name, path in self._repository.archives().items()}


def _as_directory(text: str) -> Path:
    """`text` as an absolute path, without links resolved."""
    path = Path(os.path.normpath(text))
    if not path.is_absolute() or "\0" in text or _is_too_long(path):
        raise InvalidArgumentError(f"expected the absolute path of a model's directory, got '{text:.200}'")
    if path.parts[1:2] and path.parts[1] in _NO_MODELS:
        raise InvalidArgumentError(f"there are no models below /{path.parts[1]}, got '{text:.200}'")
    return path


def _is_too_long(path: Path) -> bool:
    """Whether no file system can have such a path."""
    sizes = [len(part.encode("utf-8", "surrogatepass")) for part in path.parts]
    return max(sizes) > _MAX_NAME_BYTES or sum(sizes) + len(sizes) > _MAX_PATH_BYTES


def _unknown(key: str, verb: str, accepted: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"unrecognized {verb} parameter '{key}': accepted are {accepted}")


def _as_path(key: str) -> str:
    """The path below the model's directory that a parameter names: `/1/model.py` is `1/model.py`, as in Triton."""
    return "/".join(part for part in key.removeprefix(_FILE_PREFIX).split("/") if part not in ("", "."))


def _as_text(key: str, value: ControlParameter) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise InvalidArgumentError(f"load parameter '{key}': expected UTF-8 text") from None
    raise InvalidArgumentError(f"load parameter '{key}': expected a string of JSON, got {_kind(value)}")


def _as_bytes(key: str, value: ControlParameter) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise InvalidArgumentError(f"load parameter '{key}': expected the file's content, got {_kind(value)}")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidArgumentError(f"load parameter '{key}': expected base64") from None


def _as_bool(verb: str, key: str, value: ControlParameter) -> bool:
    if isinstance(value, bool):
        return value
    raise InvalidArgumentError(f"{verb} parameter '{key}': expected a boolean, got {_kind(value)}")


def _as_duration(key: str, value: ControlParameter) -> float:
    """Seconds; a negative number means for ever."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InvalidArgumentError(f"load parameter '{key}': expected seconds or a duration, got {_kind(value)}")
    try:
        return parse_keep_alive(str(value))
    except ValueError as error:
        raise InvalidArgumentError(f"load parameter '{key}': {error}") from None


def _as_version(verb: str, value: ControlParameter, in_path: int | None) -> int:
    """The version that the parameter names: an integer, or its digits in a string."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < _MOST_VERSION_DIGITS:
        version = int(value)
    elif isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        version = value
    else:
        got = f"'{value:.40}'" if isinstance(value, str) else str(value) if type(value) is int else _kind(value)
        raise InvalidArgumentError(f"{verb} parameter '{_VERSION}': expected the number of a version, got {got}")
    if in_path not in (None, version):
        raise InvalidArgumentError(
            f"{verb} parameter '{_VERSION}' is {version} and the path says version {in_path}: give one of them"
        )
    return version


def _kind(value: ControlParameter) -> str:
    names: dict[type, str] = {bool: "a boolean", int: "an integer", str: "a string", bytes: "bytes"}
    return names[type(value)]
