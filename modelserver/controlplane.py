"""Where both protocols meet to control models: the repository index, load and unload."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

from modelserver.errors import InvalidArgumentError, UnsupportedError
from modelserver.repository.model_name import check_model_name
from modelserver.repository.repository import ModelRepository
from modelserver.repository.state import IndexEntry, ModelState

ControlParameter = bool | int | str | bytes

_CONFIG = "config"
_FILE_PREFIX = "file:"
_UNLOAD_DEPENDENTS = "unload_dependents"


class ControlPlane:
    """What a frontend calls to see and change which models are loaded. Event loop thread only."""

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository

    def index(self, ready_only: bool = False, repository_name: str = "") -> list[IndexEntry]:
        """The rows of all models, or of the ready versions. Raises UnsupportedError when a repository is named."""
        _refuse_repository(repository_name)
        rows = self._repository.index()
        return [row for row in rows if row.state is ModelState.READY] if ready_only else rows

    async def load(
        self, name: str, parameters: Mapping[str, ControlParameter] | None = None, *, repository_name: str = ""
    ) -> None:
        """Load or reload a model; returns when it serves.

        `config` is a model config as JSON that replaces the file; `file:<version>/<path>` is the content
        of a file (bytes, or base64 in a str), and together these replace the model's directory.
        Raises InvalidArgumentError for parameters that do not make sense, else as `ModelRepository.load`.
        """
        _refuse_repository(repository_name)
        check_model_name(name)
        config_json: str | None = None
        files: dict[str, bytes] = {}
        for key, value in (parameters or {}).items():
            if key == _CONFIG:
                config_json = _as_text(key, value)
            elif key.startswith(_FILE_PREFIX):
                files[key.removeprefix(_FILE_PREFIX)] = _as_bytes(key, value)
            else:
                raise _unknown(key, "load", f"'{_CONFIG}' and '{_FILE_PREFIX}<version>/<path>'")
        await self._repository.load(name, config_json=config_json, files=files or None)

    async def unload(
        self, name: str, parameters: Mapping[str, ControlParameter] | None = None, *, repository_name: str = ""
    ) -> None:
        """Unload a model; returns when it takes no more requests. One that is not loaded is no error."""
        _refuse_repository(repository_name)
        check_model_name(name)
        unload_dependents = False
        for key, value in (parameters or {}).items():
            if key != _UNLOAD_DEPENDENTS:
                raise _unknown(key, "unload", f"'{_UNLOAD_DEPENDENTS}'")
            if not isinstance(value, bool):
                raise InvalidArgumentError(f"unload parameter '{key}': expected a boolean, got {_kind(value)}")
            unload_dependents = value
        await self._repository.unload(name, unload_dependents=unload_dependents)


def _refuse_repository(repository_name: str) -> None:
    if repository_name:
        raise UnsupportedError(
            f"repository '{repository_name}': naming one repository is not supported; leave its name out"
        )


def _unknown(key: str, verb: str, accepted: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"unrecognized {verb} parameter '{key}': accepted are {accepted}")


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


def _kind(value: ControlParameter) -> str:
    names: dict[type, str] = {bool: "a boolean", int: "an integer", str: "a string", bytes: "bytes"}
    return names[type(value)]
