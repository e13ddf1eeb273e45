"""Resolves model names with `--model-namespacing`, where several repositories may have a model of the same name.

Inside the server a model has a key: its name, or with namespacing `<repository>::<name>`. A client may always use the
key instead of the name. The name alone works as long as only one repository holds a model of that name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from modelserver.errors import InvalidArgumentError, NotFoundError, UnsupportedError

SEPARATOR = "::"


class AmbiguousModelError(InvalidArgumentError):
    """Several repositories have a model of that name, and the request does not choose one."""


def repository_names(paths: Sequence[Path], taken: Sequence[str] = ()) -> tuple[str, ...]:
    """A name for each root: the last part of its path, with a number where an earlier one, or `taken`, has the same."""
    names = list(taken)
    for path in paths:
        base = (path.name or path.absolute().name or "models").replace(SEPARATOR, "_")
        name, number = base, 1
        while name in names:
            number += 1
            name = f"{base}-{number}"
        names.append(name)
    return tuple(names[len(taken) :])


def key_of(repository: str, name: str) -> str:
    """The key of a model; `repository` is empty without namespacing."""
    return f"{repository}{SEPARATOR}{name}" if repository else name


class Namespaces:
    """The keys of models by their names. `repositories` are the names of the roots."""

    def __init__(self, repositories: Sequence[str] = (), *, is_on: bool = False) -> None:
        self.repositories = tuple(repositories)
        self.is_on = is_on

    def split(self, key: str) -> tuple[str, str]:
        """Repository and name; the repository is empty without namespacing, and for a name that is not a key."""
        repository, separator, name = key.partition(SEPARATOR)
        if self.is_on and separator and repository in self.repositories:
            return repository, name
        return "", key

    def name_of(self, key: str) -> str:
        return self.split(key)[1]

    def check(self, repository: str) -> None:
        """Raise NotFoundError for an unknown repository."""
        if repository not in self.repositories:
            raise NotFoundError(
                f"there is no model repository '{repository:.200}'; there are: {', '.join(self.repositories)}"
            )

    def named(self, name: str, repository: str) -> str:
        """The key of a model of this `repository`, if one is named, else the name.

        Raises UnsupportedError without namespacing, as Triton does, and NotFoundError for an unknown repository.
        """
        if not repository:
            return name
        if not self.is_on:
            raise UnsupportedError(
                f"repository '{repository:.200}': naming one repository is not supported without --model-namespacing; "
                "leave its name out"
            )
        self.check(repository)
        return key_of(repository, name)

    def keys(self, name: str, known: Iterable[str]) -> list[str]:
        """The `known` keys that `name` (a name or a key) may mean."""
        if not self.is_on or self.split(name)[0]:
            return [key for key in (name,) if key in known]
        return sorted(key for key in known if self.name_of(key) == name)

    def ambiguous(self, name: str, keys: Sequence[str]) -> AmbiguousModelError:
        """The error for a client that must choose a repository; the first sentence is Triton's."""
        return AmbiguousModelError(
            f"There are {len(keys)} identifiers of model '{name}' in global map, model namespace must be provided to "
            f"resolve ambiguity. Ask for one of: {', '.join(keys)}"
        )


# An allow-list for model names, because names become paths, URLs and metric labels.
# Letters and digits of any script, then a few marks; never a separator, a space or a control character.
_NAME = re.compile(r"\w[\w.,+@:=~-]*")
_LONGEST_NAME_BYTES = 255


def name_problem(name: str) -> str | None:
    """Why `name` is not a valid model name; None if it is."""
    if not name:
        return "it is empty"
    if len(name.encode("utf-8", "surrogatepass")) > _LONGEST_NAME_BYTES:
        return f"it is longer than {_LONGEST_NAME_BYTES} bytes"
    if ".." in name:
        return "it contains '..'"
    if not _NAME.fullmatch(name):
        return "it must start with a letter, a digit or '_' and hold only letters, digits and _ . , + @ : = ~ -"
    return None


def check_model_name(name: str) -> None:
    """Raise InvalidArgumentError for an invalid model name."""
    problem = name_problem(name)
    if problem is None:
        return
    if not name.strip():
        raise InvalidArgumentError(
            f"Model name cannot be empty. Please enter a valid name to deploy. Got {name[:300]!r}"
        )
    if name in (".", "..") or "/" in name or "\\" in name:
        problem = f"model name must not contain path traversal characters: {problem}"
        raise InvalidArgumentError(f"invalid model name '{name[:300]}', {problem}")
    raise InvalidArgumentError(f"invalid model name {name[:300]!r}: {problem}")
