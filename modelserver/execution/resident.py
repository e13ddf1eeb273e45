"""What a recipe may build in a child process in place of an instance: something with a main loop of its own."""

from __future__ import annotations

import abc


class Resident(abc.ABC):
    """Takes the child process over once the server has heard that it stands."""

    @abc.abstractmethod
    def run(self) -> int:
        """Serve until the end of the process; its exit status."""
