"""Collects the problems that the validation rules find."""

from __future__ import annotations

from pathlib import PurePosixPath

from modelserver.config.problem import Locations, Problem


class Report:
    """The problems of one config, each with its place if the config came from a text."""

    def __init__(self, source: str, locations: Locations | None, model_name: str = "") -> None:
        self.model_name = model_name
        self._source = source
        self._locations = locations
        self.problems: list[Problem] = []

    def add(self, path: str, message: str, hint: str | None = None, *, summary: str = "") -> None:
        """Add a problem of the field at `path`; `message` states the expected and the actual value.

        `summary` is Triton's sentence for the mistake, if it has one.
        """
        line, column = (self._locations.find(path) if self._locations else None) or (None, None)
        self.problems.append(Problem(self._source, line, column, path, message, hint, summary))

    def check_name(self, path: str, name: str, what: str, *, summary: str = "") -> None:
        """A name must not be empty."""
        if not name:
            self.add(path, f"expected {what}, got none", summary=summary)

    def check_file(self, path: str, filename: str) -> None:
        """A file of the model must lie in the model's own directory."""
        file = PurePosixPath(filename.replace("\\", "/"))
        if file.is_absolute() or ".." in file.parts or "\0" in filename:
            self.add(path, f"expected a path inside the model's directory, got '{filename}'")
