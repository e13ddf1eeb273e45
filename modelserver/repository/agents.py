"""Repository agents of a model. They are found by name and run in order before the model's directory is read."""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from modelserver.backend.discovery import find_source, import_source
from modelserver.config.schema import RepositoryAgent as AgentConfig
from modelserver.errors import InternalError, InvalidArgumentError, NotFoundError, ServerError
from modelserver.repoagent import AgentContext, RepositoryAgent
from modelserver.repository.held_resource import HeldResource
from modelserver.repository.load_request import contained_path

if TYPE_CHECKING:
    from hashlib import _Hash

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
_METHODS = ("MD5", "SHA256")


class ChecksumAgent(RepositoryAgent):
    """The agent `checksum`: a model is loaded only if its files match the checksums in its config.

    Parameters are `MD5:<file>` (Triton's) or `SHA256:<file>`, relative to the model's directory, with the checksum in
    hex.
    """

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


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_BUNDLED = {"checksum": ChecksumAgent}


class AgentRun(HeldResource):
    """The agents of one load, and the directory that they produce, held as long as something reads it."""

    def __init__(
        self, model_name: str, directory: Path, agents: Sequence[AgentConfig], agent_directory: Path | None
    ) -> None:
        """Run them in order. Blocking; raises ServerError, naming the agent, with nothing left behind."""
        super().__init__()
        self.directory = directory
        self._model_name = model_name
        self._workspace = Path(tempfile.mkdtemp(prefix=f"modelserver-agents-{model_name[:60]}-"))
        self._loaded: list[RepositoryAgent] = []
        try:
            for index, agent in enumerate(agents):
                self._run(index, agent, agent_directory)
        except BaseException:
            self.release()
            raise

    def _run(self, index: int, config: AgentConfig, agent_directory: Path | None) -> None:
        agent_class = find_agent(config.name, agent_directory)
        workspace = self._workspace / str(index)
        workspace.mkdir()
        context = AgentContext(self._model_name, self.directory, workspace, dict(config.parameters))
        what = f"repository agent '{config.name}' of model '{self._model_name}'"
        try:
            agent = agent_class(context)
            directory = agent.load()
        except ServerError as error:
            raise ServerError(f"{what}: {error.message}", code=error.code) from error
        except Exception as error:
            logger.exception("%s failed", what)
            raise InternalError(f"{what}: {type(error).__name__}: {error}") from error
        self._loaded.append(agent)
        if directory is None:
            return
        if not Path(directory).is_dir():
            raise InternalError(f"{what}: expected it to return a directory or None, got '{directory}'")
        self.directory = Path(directory)
        logger.info("%s put %s in place of the model's directory", what, directory)

    def _free(self) -> None:
        for agent in reversed(self._loaded):
            try:
                agent.unload()
            except Exception:
                logger.exception("repository agent %s of model '%s' failed to unload", agent, self._model_name)
        shutil.rmtree(self._workspace, ignore_errors=True)


def find_agent(name: str, agent_directory: Path | None) -> type[RepositoryAgent]:
    """The class of an agent: from the operator's directory, or a bundled one.

    Raises NotFoundError for an unknown name, InternalError for code that cannot be imported or holds no agent.
    """
    if not _NAME.fullmatch(name):
        raise InvalidArgumentError(f"repository agent '{name}': expected a name of letters, digits, '_' and '-'")
    source = find_source(agent_directory, name) if agent_directory is not None else None
    if source is None:
        if name in _BUNDLED:
            return _BUNDLED[name]
        looked = agent_directory if agent_directory is not None else "no --repoagent-directory is given"
        raise NotFoundError(
            f"unknown repository agent '{name}': expected {name}.py or {name}/__init__.py in --repoagent-directory "
            f"({looked}), or one of the bundled agents: {', '.join(_BUNDLED)}"
        )
    try:
        module = import_source(f"agent_{name}", source)
    except Exception as error:
        logger.exception("repository agent '%s' cannot be imported", name)
        raise InternalError(
            f"repository agent '{name}' from {source} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    candidate = getattr(module, "AGENT", None)
    if isinstance(candidate, type) and issubclass(candidate, RepositoryAgent):
        return candidate
    raise InternalError(
        f"repository agent '{name}' from {source}: expected a module-level name AGENT holding a subclass of "
        f"modelserver.repoagent.RepositoryAgent, found {candidate!r}"
    )
