"""The lifecycle of one model: loads, swaps and retires its versions, and knows the state of each.

An operation (load or unload) is one transaction over all versions of the model, or one of them; `Reload` does a
load. All methods are called from the event loop thread; blocking work goes to the pools.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from modelserver.errors import SHUTTING_DOWN, ServerError, UnavailableError
from modelserver.execution.model import Model
from modelserver.repository.load_request import LoadRequest
from modelserver.repository.loader import LoadSource
from modelserver.repository.operations import OperationQueue, OperationRequest, SupersededError, UnloadRequest
from modelserver.repository.plan import LoadedVersion
from modelserver.repository.reload import Reload
from modelserver.repository.serving import LifecycleContext, ServingVersions, VersionStates
from modelserver.repository.state import CompletionError, IndexEntry, Standing, VersionsFailedError
from modelserver.telemetry.counts import LoadCounts

logger = logging.getLogger(__name__)

# The longest wait before a load is tried again that failed because something else is not there yet.
_LONGEST_RETRY_S = 30.0
# How many changes of an override the index shows; the log shows all.
_MOST_CHANGES = 10


class ModelLifecycle:
    """The versions of one model, in any state."""

    def __init__(self, name: str, context: LifecycleContext) -> None:
        self.name = name
        self.counts = LoadCounts()
        self._context = context
        self._states = VersionStates(name)
        self._serving = ServingVersions(name, context, self._note_closed)
        # Whether the model should be ready: the last finished operation was a load.
        self._is_wanted = False
        self._is_stopped = False
        self._reload: Reload | None = None
        # Whether another load would give the same result: the model serves as on disk, or by the stored override.
        self.is_as_stored = True
        # Whether a config that came with a request, and no files, replaces the one on disk.
        self._has_own_config = False
        self._operations = OperationQueue(name, self._perform)
        # The load that comes by itself, and how many of them have failed in a row.
        self._retry: asyncio.TimerHandle | None = None
        self._num_retries = 0

    def load(self, request: LoadRequest) -> asyncio.Future[None]:
        """Load or reload; done when the new versions serve, or fails with the ServerError that prevented it."""
        return self._submit(request)

    def unload(self, version: int | None = None) -> asyncio.Future[None]:
        """Done when the model, or that version, takes no more requests; accepted requests are answered afterwards."""
        return self._submit(UnloadRequest(version))

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that are ready, ascending."""
        return self._serving.versions

    @property
    def models(self) -> list[Model]:
        """The ready models, ascending by version."""
        return self._serving.models

    @property
    def loaded(self) -> dict[int, LoadedVersion]:
        """All loaded versions, ready or not."""
        return self._serving.loaded

    @property
    def ensembles(self) -> list[LoadedVersion]:
        """The loaded versions that are ensembles, even if their models are not loaded."""
        return self._serving.ensembles

    @property
    def pending_load(self) -> asyncio.Future[None] | None:
        """The result of a running or waiting load, unless it will be undone."""
        return self._operations.pending_load

    @property
    def is_busy(self) -> bool:
        """Whether an operation is running or waiting."""
        return self._operations.runner is not None

    def evict(self) -> bool:
        """Unload the model if no operation is running and no request is in flight; returns whether it was unloaded.

        It happens within this call: no request can arrive in between.
        """
        idle = all(loaded.model.is_idle for loaded in self.loaded.values())
        if self._is_stopped or self.is_busy or not self.loaded or not idle:
            return False
        self._unload()
        return True

    async def wait_retired(self, timeout_s: float | None = None) -> None:
        """Return when versions that were unloaded or replaced are closed, or time is up."""
        await self._serving.retirement.wait(timeout_s)

    @property
    def replacing(self) -> asyncio.Future[None] | None:
        """The result of a reload during which the model does not serve, because it leaves memory first."""
        return self._operations.pending_load if self._reload is not None and self._reload.is_vacated else None

    def rebind(self) -> None:
        """The models of an ensemble have changed: call the new ones, or do not serve."""
        self._serving.rebind()

    @property
    def standing(self) -> Standing:
        """Whether the model serves, or should. An ensemble serves unless its models are loaded and do not fit."""
        if self.loaded.keys() - self._serving.mismatched:
            return Standing.SERVING
        return Standing.MISSING if self._is_wanted else Standing.ABSENT

    @property
    def retiring_models(self) -> list[Model]:
        """Models that take no new requests and finish their requests, the newest first."""
        return [loaded.model for loaded in reversed(self._serving.retirement.versions)]

    def index(self) -> list[IndexEntry]:
        """One row per known version, ascending; one without a version if none is known."""
        return self._states.index(self.loaded, self._serving.retirement.versions)

    def stop(self) -> None:
        """Accept no more operations: loaded versions are unloaded; a waiting or running operation will fail."""
        self._is_stopped = True
        self._cancel_retry()
        self._operations.supersede(SHUTTING_DOWN)
        self._unload()

    async def wait_idle(self) -> None:
        """Return when no operation is running."""
        while tasks := self._running_tasks():
            await asyncio.wait(tasks)

    def cancel(self) -> None:
        """Cancel the running operation; the loader closes the models that it leaves open."""
        for task in self._running_tasks():
            task.cancel()

    def _running_tasks(self) -> list[asyncio.Task[None]]:
        runner = self._operations.runner
        return [*self._serving.retirement.tasks, *([runner] if runner is not None else [])]

    def _submit(self, request: OperationRequest) -> asyncio.Future[None]:
        if self._is_stopped:
            raise UnavailableError(SHUTTING_DOWN)
        return self._operations.submit(request)

    def _load_later(self, request: LoadRequest, retry_after_s: float) -> None:
        """Try a load again that waits for something else, unless another operation comes first."""
        if self._is_stopped or self._operations.is_unload_waiting(request.version):
            return
        delay_s = min(retry_after_s * 2.0 ** min(self._num_retries, 16), _LONGEST_RETRY_S)
        self._num_retries += 1
        self._retry = asyncio.get_running_loop().call_later(delay_s, self._submit, request)

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    async def _perform(self, request: OperationRequest) -> None:
        self._cancel_retry()
        if isinstance(request, UnloadRequest):
            self._unload(request.version)
        else:
            await self._load(request)

    # Loading.

    async def _load(self, request: LoadRequest) -> None:
        started = time.monotonic()
        if await self._is_current(request):
            self._is_wanted = True
            self._states.forget_failures(None)
            self.counts = LoadCounts(self.counts.successes + 1, self.counts.failures, time.monotonic() - started)
            by = " by its override" if self._has_own_config else ""
            logger.info(
                "model '%s' serves versions %s on%s: its files have not changed", self.name, list(self.versions), by
            )
            return
        self._states.is_loading = True
        source: LoadSource | None = None
        try:
            source = await self._context.in_load_pool(self._context.loader.read, self.name, request)
            source = replace(source, is_wanted=lambda: self._is_still_wanted(request.version))
            if source.definition.config.is_ensemble:
                await self._context.compose(self.name, source.definition)
            self._reload = self._reload_from(source, request.version)
            await self._reload.run()
        except CompletionError as error:
            reasons = dict.fromkeys(error.versions, error.reason)
            failed = VersionsFailedError(self.name, reasons, needs_change=error.needs_change)
            self._note_failure(failed, request.version)
            if error.retry_after_s is not None:
                self._load_later(request, error.retry_after_s)
            raise failed from error
        except ServerError as error:
            self._note_failure(error, request.version)
            raise
        finally:
            self._states.is_loading, self._states.loading = False, ()
            self._reload = None
            self._is_wanted = not self._is_stopped
            self._serving.publish()  # from now on, a model that failed to load is known
            if source is not None and source.held:
                self._context.close_pool.submit(source.release)
        self._num_retries = 0
        self._states.forget_failures(request.version)
        self.is_as_stored = request.version is None and (request.is_plain or bool(request.persists))
        by_config = source.request.config_json is not None and not source.request.files
        self._has_own_config = request.version is None and by_config
        self.counts = LoadCounts(self.counts.successes + 1, self.counts.failures, time.monotonic() - started)
        if request.version is None:
            self._states.note = await self._context.in_load_pool(self._settle_override, request, source)

    async def _is_current(self, request: LoadRequest) -> bool:
        """Whether what serves may stay: a load would bring the same, or an override lasts until the files change."""
        loaded = self.loaded
        if not loaded or request.version is not None or not request.is_plain:
            return False
        definition = next(iter(loaded.values())).definition
        is_whole = loaded.keys() == definition.versions.keys()
        if not is_whole or any(each.definition is not definition or not each.is_ready for each in loaded.values()):
            return False
        if self._has_own_config:
            keeps = not request.drops_override and request.persists is None
            return keeps and await self._context.in_load_pool(
                self._context.loader.has_same_files, self.name, definition
            )
        if not self.is_as_stored or self._context.overrides is not None:
            return False
        return await self._context.in_load_pool(self._context.loader.is_current, self.name, definition)

    def _settle_override(self, request: LoadRequest, source: LoadSource) -> str:
        """Store or delete the override as requested; returns a note about the stored override. Blocking."""
        store = self._context.overrides
        if store is None:
            return ""
        if request.persists:
            store.save(self.name, request)
        elif request.persists is False:
            store.remove(self.name)
        if request.persists or source.request.is_stored:
            shown = [*source.changes[:_MOST_CHANGES], *(["..."] if len(source.changes) > _MOST_CHANGES else [])]
            return f"overridden, also after a restart: {'; '.join(shown) or 'no differences'}"
        return "a stored override takes effect at the next start" if store.has(self.name) else ""

    def _note_failure(self, error: ServerError, version: int | None) -> None:
        serving = f"; versions {list(self.versions)} still serve" if self.loaded else ""
        logger.error("loading model '%s' failed%s: %s", self.name, serving, error.message)
        self._states.note_failure(error, version, self.loaded)
        self.counts = LoadCounts(self.counts.successes, self.counts.failures + 1, self.counts.last_duration_s)

    def _reload_from(self, source: LoadSource, version: int | None) -> Reload:
        return Reload(
            self.name,
            self._context,
            self._serving,
            self._states,
            source,
            version,
            check_wanted=lambda: self._check_still_wanted(version),
            is_stopped=lambda: self._is_stopped,
        )

    def _is_still_wanted(self, version: int | None) -> bool:
        """Whether a load of that version, or of all, makes sense. Called from any thread."""
        return not self._is_stopped and not self._operations.is_unload_waiting(version)

    def _check_still_wanted(self, version: int | None) -> None:
        """Raise if a newer unload makes the swap pointless."""
        if self._is_stopped:
            raise UnavailableError(SHUTTING_DOWN)
        if not self._is_still_wanted(version):
            raise SupersededError(f"no version is available: superseded by a newer unload of model '{self.name}'")

    # Unloading.

    def _unload(self, version: int | None = None) -> None:
        """Stop all versions, or one, at once; they drain and close in the background."""
        self._states.forget_failures(version)
        removed = [number for number in self.loaded if version in (None, number)]
        if version is None or (removed and len(removed) == len(self.loaded)):
            self._is_wanted = False
        self._serving.remove(removed)

    def _note_closed(self, version: int) -> None:
        if version not in self.loaded:
            self._states.unloaded.add(version)
