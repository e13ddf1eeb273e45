"""The calls of a client besides inference: metadata, configs, statistics, loads, shared memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from modelserver.core.spelling import suggest
from modelserver.errors import ErrorCode, InvalidArgumentError, NotFoundError, ServerError, UnavailableError

TIMEOUT_S = 30.0
# A load may compile, or read tens of gigabytes.
LOAD_TIMEOUT_S = 300.0

Document = dict[str, Any]


class ControlClient(ABC):
    """Blocking calls with the same documents over HTTP and gRPC: the names are those of Triton's JSON.

    Every method raises UnavailableError when no server answers, and for an error answer a ServerError with the
    server's own message.
    """

    @abstractmethod
    def index(self) -> list[Document]:
        """The rows of the repository index."""

    @abstractmethod
    def model_metadata(self, model: str, version: str = "") -> Document: ...

    @abstractmethod
    def model_config(self, model: str, version: str = "") -> Document: ...

    @abstractmethod
    def statistics(self, model: str, version: str = "") -> list[Document]:
        """The statistics of each version, or of the one that is given."""

    @abstractmethod
    def load(self, model: str, parameters: Mapping[str, str | bool] | None = None) -> None:
        """Load a model. The parameter `config` is JSON that replaces the model's own config."""

    @abstractmethod
    def unload(self, model: str, parameters: Mapping[str, str | bool] | None = None) -> None: ...

    @abstractmethod
    def register_region(self, region: str, kind: str, details: Document) -> None:
        """Announce a region of shared memory; `kind` is system or cuda."""

    @abstractmethod
    def unregister_region(self, region: str, kind: str) -> None: ...

    @contextmanager
    def hinted(self, model: str) -> Iterator[None]:
        """Add the closest name of the index to an error of the block, if `model` is not in the index."""
        try:
            yield
        except UnavailableError:
            raise
        except ServerError as error:
            nearest = None if "did you mean" in error.message else self._nearest_model(model)
            if nearest is None:
                raise
            raise type(error)(f"{error.message}; did you mean '{nearest}'?", code=error.code) from None

    def _nearest_model(self, model: str) -> str | None:
        """The closest name in the index to an unknown name."""
        try:
            names = {row["name"] for row in self.index()}
        except (ServerError, KeyError, TypeError):
            return None
        return None if model in names else suggest(model, names)


_KINDS: dict[str, type[ServerError]] = {
    "HTTP 400": InvalidArgumentError,
    "HTTP 404": NotFoundError,
    "HTTP 503": UnavailableError,
    "INVALID_ARGUMENT": InvalidArgumentError,
    "NOT_FOUND": NotFoundError,
    "UNAVAILABLE": UnavailableError,
}


def error_of(failure: str) -> ServerError:
    """The error that a lane's failure stands for: a status of HTTP or gRPC, and the server's words."""
    status, colon, message = failure.partition(": ")
    kind = _KINDS.get(status)
    if kind is not None:
        return kind(message)
    return ServerError(message if colon else failure, code=ErrorCode.INTERNAL)
