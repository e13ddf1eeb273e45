"""Hundreds of reloads while requests never stop: none may fail, and none may get a wrong answer."""

import asyncio
import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.repositories import GatedLoader, infer, open_repository, write_model

from modelserver.repository.options import ControlMode
from modelserver.repository.repository import ModelRepository

NUM_RELOADS = 300
NUM_CLIENTS = 8
INLINE = ""
WITH_WORKERS = 'parameters { key: "execute_delay_ms" value { string_value: "0.5" } } instance_group [ { count: 2 } ]'


@dataclass
class Traffic:
    """Clients that ask without a pause until told to stop; any failure ends the test."""

    repository: ModelRepository
    num_answers: int = 0
    is_over: bool = False

    async def ask(self, client: int) -> None:
        for number in itertools.count(client * 1_000_000):
            if self.is_over:
                return
            await infer(self.repository, "m", number)
            self.num_answers += 1
            # Inline answers come without a turn of the loop's selector; the reloads need theirs.
            await asyncio.sleep(0)


@pytest.mark.parametrize("extra", [INLINE, WITH_WORKERS], ids=["inline", "workers"])
async def test_hundreds_of_reloads_lose_no_request(tmp_path: Path, extra: str) -> None:
    directory = write_model(tmp_path, "m", extra=extra)
    loader = GatedLoader()
    async with open_repository(tmp_path, load_models=("m",), loader=loader) as repository:
        traffic = Traffic(repository)
        async with asyncio.timeout(60), asyncio.TaskGroup() as clients:
            for client in range(NUM_CLIENTS):
                clients.create_task(traffic.ask(client))
            for number in range(NUM_RELOADS):
                (directory / "1" / "weights").write_bytes(b"x" * (number + 1))
                await repository.load("m")
            traffic.is_over = True
        assert len(loader.loaded) == NUM_RELOADS + 1
        assert repository.load_counts()["m"].failures == 0
        assert traffic.num_answers > NUM_RELOADS
        await repository._lifecycles["m"].wait_idle()
        assert len(loader.closed) == NUM_RELOADS


async def test_versions_that_come_and_go_by_polling_lose_no_request(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    async with open_repository(tmp_path, control_mode=ControlMode.POLL) as repository:
        traffic = Traffic(repository)
        async with asyncio.timeout(60), asyncio.TaskGroup() as clients:
            for client in range(NUM_CLIENTS):
                clients.create_task(traffic.ask(client))
            for version in range(2, 52):
                write_model(tmp_path, "m", versions=(version,))
                for _ in range(2):
                    await repository._poller.poll_once()
                    await repository._poller.wait_idle()
                assert repository.get("m", None).version == version
            traffic.is_over = True


async def test_failing_reloads_lose_no_request(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "m")
    loader = GatedLoader()
    async with open_repository(tmp_path, control_mode=ControlMode.POLL, loader=loader) as repository:
        traffic = Traffic(repository)
        model = repository.get("m", None)
        loader.fail("m", 1)
        async with asyncio.timeout(60), asyncio.TaskGroup() as clients:
            for client in range(NUM_CLIENTS):
                clients.create_task(traffic.ask(client))
            for number in range(50):
                (directory / "1" / "weights").write_bytes(b"x" * (number + 1))
                for _ in range(2):
                    await repository._poller.poll_once()
                    await repository._poller.wait_idle()
            traffic.is_over = True
        assert repository.get("m", None) is model
        assert repository.load_counts()["m"].failures == 50


async def test_batching_that_changes_under_way_loses_no_request(tmp_path: Path) -> None:
    """Rules, levels, limits and instances change; the backend's objects stay the same throughout."""
    write_model(tmp_path, "m", extra=WITH_WORKERS + "dynamic_batching { }")
    loader = GatedLoader()
    variants = itertools.cycle(
        [
            "max_queue_delay_microseconds: 2000",
            "preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 500",
            "priority_levels: 4 default_priority_level: 3",
            "default_queue_policy { max_queue_size: 50 default_timeout_microseconds: 30000000 }",
        ]
    )
    async with open_repository(tmp_path, load_models=("m",), loader=loader) as repository:
        model, traffic = repository.get("m", None), Traffic(repository)
        async with asyncio.timeout(60), asyncio.TaskGroup() as clients:
            for client in range(NUM_CLIENTS):
                clients.create_task(traffic.ask(client))
            for number in range(NUM_RELOADS):
                groups = WITH_WORKERS.replace("count: 2", f"count: {1 + number // 10 % 3}")
                write_model(tmp_path, "m", versions=(), extra=f"{groups} dynamic_batching {{ {next(variants)} }}")
                await repository.load("m")
                assert repository.get("m", None) is model
            traffic.is_over = True
        assert loader.loaded == [model]
        assert model.config.dynamic_batching.default_queue_policy.max_queue_size == 50
        assert traffic.num_answers > NUM_RELOADS


async def test_versions_loaded_and_unloaded_one_by_one_lose_no_request(tmp_path: Path) -> None:
    write_model(tmp_path, "m", versions=(1, 2, 3))
    async with open_repository(tmp_path, load_models=("m",)) as repository:
        traffic = Traffic(repository)
        async with asyncio.timeout(60), asyncio.TaskGroup() as clients:
            for client in range(NUM_CLIENTS):
                clients.create_task(traffic.ask(client))
            for number in range(NUM_RELOADS):
                await repository.load("m", version=1 + number % 3)
                await repository.unload("m", version=1 + (number + 2) % 3)
            traffic.is_over = True
        assert repository.ready_versions("m") == (1 + (NUM_RELOADS - 1) % 3,)
