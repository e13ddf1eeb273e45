"""Traffic that outlives the server: one file in the directory of overrides, replaced as a whole."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import orjson

from modelserver.errors import InternalError, InvalidArgumentError
from modelserver.repository.override_store import write_whole
from modelserver.repository.traffic import Traffic, parse_traffic

logger = logging.getLogger(__name__)


class TrafficStore:
    """By model name. Methods block and may be called from any thread."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "traffic.json"
        self._lock = threading.Lock()  # guards the file

    def read(self) -> dict[str, Traffic]:
        """What was kept; what cannot be read is logged and left out."""
        with self._lock:
            try:
                documents = self._documents()
            except (OSError, ValueError) as error:
                logger.error("the traffic that was kept in %s cannot be read: %s", self._path, error)
                return {}
        kept = {}
        for name, document in documents.items():
            try:
                kept[name] = parse_traffic(document)
            except InvalidArgumentError as error:
                logger.error("the traffic of model '%s' that was kept is not used: %s", name, error.message)
        return kept

    def save(self, name: str, traffic: Traffic | None) -> None:
        """Keep this in place of what was kept of the model, or with None nothing. Raises InternalError."""
        with self._lock:
            try:
                documents = self._documents()
                if traffic is None and name not in documents:
                    return
                documents.pop(name, None)
                if traffic is not None:
                    documents[name] = traffic.document
                write_whole(self._path, orjson.dumps(documents, option=orjson.OPT_INDENT_2))
            except (OSError, ValueError) as error:
                raise InternalError(f"the traffic of model '{name}' cannot be kept in {self._path}: {error}") from error

    def _documents(self) -> dict[str, Any]:
        if not self._path.exists():
            return {}
        documents = orjson.loads(self._path.read_bytes())
        if not isinstance(documents, dict) or not all(isinstance(each, dict) for each in documents.values()):
            raise ValueError("expected an object of objects")
        return documents
