"""The contract between the server and a repository agent: all that an agent's author imports.

An agent sees a model's directory before the server reads it: it may verify it, or put another in its place (decrypted,
fetched, unpacked). A model names its agents in `model_repository_agents` of its config. An agent is a module or a
package in `--repoagent-directory` that holds a module-level name `AGENT`: a subclass of `RepositoryAgent`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from modelserver.errors import InternalError, InvalidArgumentError, NotFoundError, ServerError, UnavailableError

__all__ = [
    "AgentContext",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "RepositoryAgent",
    "ServerError",
    "UnavailableError",
]


@dataclass(frozen=True, slots=True)
class AgentContext:
    """What an agent is told about the load that it takes part in.

    `model_directory` is the repository's own, or what the agent before has put in its place; it is not to be written.
    `workspace` is an empty directory of this agent and load, removed after `unload`.
    """

    model_name: str
    model_directory: Path
    workspace: Path
    parameters: Mapping[str, str] = field(default_factory=dict)


class RepositoryAgent:
    """One agent at work for one load of one model. Its methods are called from a load thread and may block.

    Each load makes a new object; the objects of several loads of a model may live at the same time.
    """

    def __init__(self, context: AgentContext) -> None:
        self.context = context

    def load(self) -> Path | None:
        """Look at the model before it is read: the directory to read in its place, or None for the one that is there.

        Whatever this raises fails the load, and is told; the versions that serve go on.
        """
        return None

    def unload(self) -> None:
        """Nothing reads the directory any more. Called once for each `load` that returned, whatever came after it."""
