"""The parameters of a load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from modelserver.errors import InvalidArgumentError
from modelserver.repository.replacement import contained_path


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Replacements for the model on disk: a config (JSON), and with it all files.

    A file is its content, or a path to copy it from. `version` limits the load to that version, regardless of the
    version policy. `persists` True stores the override for later starts, False deletes the stored override,
    None leaves it unchanged. `is_stored`: this is the stored override; or, with nothing else given: use the stored
    override if it exists.
    """

    config_json: str | None = None
    files: Mapping[str, bytes | Path] | None = None
    version: int | None = None
    persists: bool | None = None
    is_stored: bool = False

    def __post_init__(self) -> None:
        if self.files and self.config_json is None:
            raise InvalidArgumentError(
                "failed to poll from model repository: file overrides need the parameter 'config' too, as they replace "
                "the whole model directory"
            )
        for path in self.files or ():
            contained_path(path)
        if self.persists and self.config_json is None:
            raise InvalidArgumentError("load parameter 'persist': there is no override to keep; give 'config' as well")
        if self.persists is not None and self.version is not None:
            raise InvalidArgumentError(
                "load parameter 'persist': an override is kept for all versions of a model, not for one; "
                "leave 'version' out"
            )

    @property
    def is_plain(self) -> bool:
        return self.config_json is None and not self.files
