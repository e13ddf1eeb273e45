"""Where the adapters of a model lie: as model.json lists them, in multi_lora.json, or beside its files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from modelserver.backend import ConfigError, InvalidArgumentError, NotFoundError, parse_json

from ..checkpoint import is_gguf
from ..options import lora_places

# Of Triton's vLLM backend: paths by names. And the directory of adapters of a version.
MULTI_LORA_JSON = "multi_lora.json"
_DIRECTORY = "adapters"
_CONFIG = "adapter_config.json"


def find_adapters(what: str, directory: Path, listed: Mapping[str, str], *, is_confined: bool) -> dict[str, Path]:
    """Each adapter by its name: those `listed`, of multi_lora.json, and directories of a version.

    `is_confined`: they must lie below the version's directory, as those do that a client has sent. Raises ConfigError
    for a name that occurs twice, and NotFoundError for one without files.
    """
    found: dict[str, Path] = {}
    for name, text in [*listed.items(), *_multi_lora(what, directory).items()]:
        place = Path(os.path.normpath(directory / Path(text).expanduser()))
        if is_confined and not place.is_relative_to(directory):
            raise ConfigError(f"{what}: the adapter '{name:.100}' lies outside {directory}: {text:.200}")
        if found.setdefault(name, place) != place:
            raise ConfigError(f"{what}: there are two adapters called '{name:.100}': {found[name]} and {place}")
    for path in sorted([*directory.glob(f"*/{_CONFIG}"), *directory.glob(f"{_DIRECTORY}/*/{_CONFIG}")]):
        found.setdefault(path.parent.name, path.parent)
    for path in sorted(directory.glob(f"{_DIRECTORY}/*.gguf")):
        found.setdefault(path.stem, path)
    for name, place in found.items():
        check_place(f"{what}: the adapter '{name:.100}'", place)
    return found


def check_place(what: str, place: Path) -> None:
    """Raise NotFoundError unless there are an adapter's files."""
    if not (place / _CONFIG).is_file() and not (is_gguf(place) and place.is_file()):
        raise NotFoundError(f"{what}: there is neither a file {place / _CONFIG} nor a GGUF file {place}")


def _multi_lora(what: str, directory: Path) -> dict[str, str]:
    path = directory / MULTI_LORA_JSON
    if not path.is_file():
        return {}
    try:
        return dict(lora_places(MULTI_LORA_JSON, parse_json(path.read_bytes(), str(path))))
    except (InvalidArgumentError, ValueError) as error:
        raise ConfigError(f"{what}: {path}: {error}") from None
