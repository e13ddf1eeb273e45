"""The agent `checksum`: a model is loaded only if its files match the checksums in its config.

Parameters are `MD5:<file>` (Triton's) or `SHA256:<file>`, relative to the model's directory, with the checksum in hex.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from modelserver.repoagent import InvalidArgumentError, RepositoryAgent
from modelserver.repository.load_request import contained_path

if TYPE_CHECKING:
    from hashlib import _Hash

_CHUNK_BYTES = 1 << 20
_METHODS = ("MD5", "SHA256")


class ChecksumAgent(RepositoryAgent):
    """Verifies every file that its parameters name."""

    def load(self) -> None:
        for key, expected in sorted(self.context.parameters.items()):
            method, colon, name = key.partition(":")
            if method not in _METHODS or not colon:
                raise InvalidArgumentError(f"expected parameters 'MD5:<file>' or 'SHA256:<file>', got '{key}'")
            self._verify(method, name, expected.strip())

    def _verify(self, method: str, name: str, expected: str) -> None:
        path = self.context.model_directory / contained_path(name)
        try:
            got = _hash(path, method)
        except OSError as error:
            raise InvalidArgumentError(
                f"file '{name}' cannot be read to verify its {method}: {error.strerror}"
            ) from None
        if got != expected.lower():
            raise InvalidArgumentError(
                f"Mismatched {method} hash for file {name}, expect: {expected}, got: {got}; "
                "put the right file there, or the right checksum into the model's config"
            )


def _hash(path: Path, method: str) -> str:
    digest: _Hash = hashlib.md5(usedforsecurity=False) if method == "MD5" else hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


AGENT = ChecksumAgent
