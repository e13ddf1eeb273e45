"""Loads that take minutes, such as builds of engines: they are told when nobody wants them any more."""

import asyncio
import threading
import time
from pathlib import Path

import pytest
from support.repositories import GatedLoader, open_repository, write_model

from modelserver.backend import Backend, BackendContext
from modelserver.errors import UnavailableError
from modelserver.execution.model import Model

PATIENCE_S = 60.0


class LongLoader(GatedLoader):
    """Its loads end when they are not wanted any more, and only then."""

    def __init__(self) -> None:
        super().__init__()
        self.contexts: list[BackendContext] = []
        self.has_begun = asyncio.Event()

    def __call__(self, backend_class: type[Backend], context: BackendContext) -> Model:
        self.num_attempts += 1
        self.contexts.append(context)
        self.loop.call_soon_threadsafe(self.has_begun.set)
        deadline_s = time.monotonic() + PATIENCE_S
        while context.is_wanted():
            assert time.monotonic() < deadline_s, "nobody said that the load is not wanted any more"
            threading.Event().wait(0.005)
        raise UnavailableError("cancelled")


async def test_an_unload_ends_the_load_that_it_would_undo(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    loader = LongLoader()
    async with open_repository(tmp_path, loader=loader, load_retry_count=3) as repository:
        loading = asyncio.create_task(repository.load("m"))
        await loader.has_begun.wait()
        assert loader.contexts[0].is_wanted()
        await repository.unload("m")
        with pytest.raises(UnavailableError):
            await loading
        assert loader.num_attempts == 1, "what nobody wants is not tried again"


async def test_the_end_of_the_server_ends_loads(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    loader = LongLoader()
    async with open_repository(tmp_path, loader=loader) as repository:
        loading = asyncio.create_task(repository.load("m"))
        await loader.has_begun.wait()
    with pytest.raises(UnavailableError):
        await loading


async def test_a_client_that_leaves_does_not_end_a_load(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    loader = LongLoader()
    async with open_repository(tmp_path, loader=loader) as repository:
        loading = asyncio.create_task(repository.load("m"))
        await loader.has_begun.wait()
        loading.cancel()
        await asyncio.wait([loading])
        assert loader.contexts[0].is_wanted(), "it asks the index later"


@pytest.mark.parametrize("files", [None, {"1/weights": b"new"}])
async def test_backends_know_whose_files_they_get(tmp_path: Path, files: dict[str, bytes] | None) -> None:
    write_model(tmp_path, "m")
    loader = LongLoader()
    config = '{"backend": "identity", "input": [{"name": "a", "data_type": "TYPE_FP32", "dims": [1]}], '
    config += '"output": [{"name": "a", "data_type": "TYPE_FP32", "dims": [1]}]}'
    async with open_repository(tmp_path, loader=loader) as repository:
        loading = asyncio.create_task(repository.load("m", config_json=config, files=files))
        await asyncio.wait([loading, asyncio.create_task(loader.has_begun.wait())], return_when="FIRST_COMPLETED")
        assert loader.contexts[0].is_uploaded is bool(files)
    with pytest.raises(UnavailableError):
        await loading
