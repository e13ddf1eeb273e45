"""Custom batching: Python code of the model decides which requests share a batch.

Where Triton loads a library, this loads `batchstrategy.py`. Only `include_request` is required. Each function gets what
the one before has returned:

    batcher = model_init(config)              once, with the model's config as a dict in Triton's JSON form
    batch = init(batcher)                     when a batch is begun
    include_request(request, batch) -> bool   for each request in turn; false closes the batch without it
    fini(batch)                               when the batch is complete
    model_fini(batcher)                       when the model is unloaded

The first request of a batch is part of it, whatever `include_request` returns. Strategies must not change or keep the
`InFlightRequest`. They run under the scheduler's lock, so they have to be quick.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from modelserver.backend.discovery import import_source
from modelserver.config.message import config_to_json
from modelserver.config.schema import ModelConfig
from modelserver.errors import ConfigError
from modelserver.scheduling.batch import Batch
from modelserver.scheduling.policy import BatchingRules
from modelserver.scheduling.queue import QueueEntry, RequestQueue

logger = logging.getLogger(__name__)

STRATEGY_PARAMETER = "TRITON_BATCH_STRATEGY_PATH"
STRATEGY_FILENAME = "batchstrategy.py"


def find_strategy(config: ModelConfig, directories: Sequence[Path]) -> Path | None:
    """The strategy's file: the one that the config's parameter names, or the first found in `directories`.

    None without dynamic batching or without a file. Raises ConfigError for a missing file, and for a compiled library.
    """
    if config.dynamic_batching is None:
        return None
    named = config.parameters.get(STRATEGY_PARAMETER, "")
    if not named:
        paths = (directory / STRATEGY_FILENAME for directory in directories)
        return next((path.resolve() for path in paths if path.is_file()), None)
    path = Path(named)
    if path.suffix == ".so":
        raise ConfigError(
            f"model '{config.name}': parameter {STRATEGY_PARAMETER}: {named} is a compiled library, and this server "
            f"takes strategies in Python: write its functions into a {STRATEGY_FILENAME}"
        )
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"model '{config.name}': parameter {STRATEGY_PARAMETER}: no Python file {named}")
    return path.resolve()


class BatchStrategy:
    """The functions of one strategy, for one loaded model version. Called under the batcher's lock."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        """Imports the file, which runs it. Raises ConfigError when that fails, or it has no `include_request`."""
        self._what = f"the batching strategy {path} of model '{config.name}'"
        self._has_failed = False
        try:
            # The name includes a hash of the contents, so that a changed file is imported anew.
            module = import_source(f"{path.stem}_{sha256(path.read_bytes()).hexdigest()[:12]}", path)
            self._include: Callable[[Any, Any], Any] = module.include_request
            self._init, self._fini = _optional(module, "init"), _optional(module, "fini")
            self._model_fini = _optional(module, "model_fini")
            self._batcher = _optional(module, "model_init")(config_to_json(config))
        except AttributeError as error:
            raise ConfigError(f"{self._what} needs a function include_request(request, batch): {error}") from error
        except Exception as error:
            raise ConfigError(f"{self._what} failed: {type(error).__name__}: {error}") from error

    def form(self, queue: RequestQueue, rules: BatchingRules, now_ns: int) -> tuple[Batch | None, int | None]:
        """Take the next batch from the queue; or None, and when to look again. As `form_batch`."""
        wait_until_ns: int | None = None
        for head in queue.heads():
            bucket = queue.bucket_of(head)
            entries, is_closed = queue.candidates(bucket)
            taken, rows, is_cut = self._choose(entries, rules.max_rows)
            ready_ns = bucket.oldest_ns() + rules.max_delay_ns
            is_complete = is_closed or is_cut or rows >= rules.preferred_rows[-1] or rows in rules.preferred_rows
            if is_complete or now_ns >= ready_ns:
                queue.remove_all(taken)
                return Batch.of(taken, rows, now_ns), None
            if wait_until_ns is None or ready_ns < wait_until_ns:
                wait_until_ns = ready_ns
        return None, wait_until_ns

    def close(self) -> None:
        """The model is unloaded."""
        try:
            self._model_fini(self._batcher)
        except Exception:
            logger.exception("%s failed in model_fini", self._what)

    def _choose(self, entries: Sequence[QueueEntry], max_rows: int) -> tuple[list[QueueEntry], int, bool]:
        """The first of the candidates, their rows, and whether one was left out: then the batch does not wait."""
        taken: list[QueueEntry] = []
        rows = 0
        try:
            batch = self._init(self._batcher)
            for entry in entries:
                if taken and (rows + entry.rows > max_rows or not self._include(entry.request, batch)):
                    break
                if not taken:
                    self._include(entry.request, batch)
                taken.append(entry)
                rows += entry.rows
            self._fini(batch)
        except Exception:
            if not self._has_failed:
                logger.exception("%s failed; the batch ends at the request where it failed", self._what)
            self._has_failed = True
            taken = taken or [entries[0]]
            return taken, sum(entry.rows for entry in taken), True
        return taken, rows, len(taken) < len(entries)


def _optional(module: ModuleType, name: str) -> Callable[[Any], Any]:
    function: Callable[[Any], Any] = getattr(module, name, _nothing)
    return function


def _nothing(_given: Any) -> None:
    return None
