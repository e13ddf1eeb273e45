"""Random interleavings of loads, unloads, changes on disk and requests: nothing is lost and nothing leaks."""

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.repositories import IDENTITY_CONFIG, GatedLoader, identity_request, write_model

from modelserver.config.message import config_to_json
from modelserver.config.pbtxt import parse_pbtxt
from modelserver.errors import NotFoundError, ServerError, UnavailableError
from modelserver.repository.options import ControlMode, RepositoryOptions
from modelserver.repository.repository import ModelRepository
from modelserver.repository.state import ModelState

NAMES = st.sampled_from(["a", "b"])
CONFIGS = [
    IDENTITY_CONFIG,
    IDENTITY_CONFIG + "version_policy { all { } }",
    IDENTITY_CONFIG + "instance_group [ { count: 2 } ]",
    IDENTITY_CONFIG + 'parameters { key: "execute_delay_ms" value { string_value: "1" } }',
    IDENTITY_CONFIG + "dynamic_batching { }",
    IDENTITY_CONFIG
    + "dynamic_batching { max_queue_delay_microseconds: 500 priority_levels: 2 default_priority_level: 1 }",
    "nonsense",
]
OVERRIDE = json.dumps(config_to_json(parse_pbtxt(IDENTITY_CONFIG).config) | {"max_batch_size": 4})


class Interleavings(RuleBasedStateMachine):
    """Starts operations without waiting for them, then lets the loop turn a little, or until all is quiet."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = tempfile.TemporaryDirectory()
        self.kept = tempfile.TemporaryDirectory()
        self.root = Path(self.directory.name)
        for name in ("a", "b"):
            write_model(self.root, name)
        self.operations: set[asyncio.Task[Any]] = set()
        self.answers: set[asyncio.Task[Any]] = set()
        self.num_changes = 0
        self.runner.run(self.start())

    async def start(self) -> None:
        self.loader = GatedLoader()
        options = RepositoryOptions(
            (self.root,), ControlMode.EXPLICIT, load_models=("a",), override_directory=Path(self.kept.name)
        )
        self.repository = ModelRepository(options, load_model=self.loader)
        await self.repository.start()

    def begin(self, tasks: set[asyncio.Task[Any]], coroutine: Any) -> None:
        async def create() -> None:
            tasks.add(asyncio.get_running_loop().create_task(coroutine))

        self.runner.run(create())

    @rule(name=NAMES)
    def load(self, name: str) -> None:
        self.begin(self.operations, self.repository.load(name))

    @rule(name=NAMES)
    def unload(self, name: str) -> None:
        self.begin(self.operations, self.repository.unload(name))

    @rule(name=NAMES, version=st.integers(1, 3))
    def load_version(self, name: str, version: int) -> None:
        self.begin(self.operations, self.repository.load(name, version=version))

    @rule(name=NAMES, version=st.integers(1, 3))
    def unload_version(self, name: str, version: int) -> None:
        self.begin(self.operations, self.repository.unload(name, version=version))

    @rule(name=NAMES, persists=st.sampled_from([None, True, False]))
    def override(self, name: str, persists: bool | None) -> None:
        self.begin(self.operations, self.repository.load(name, config_json=OVERRIDE, persists=persists))

    @rule(name=NAMES)
    def poll(self, name: str) -> None:
        """What the poller does: a load that nobody waits for."""
        self.begin(self.operations, self.repository._load_from_disk(name))

    @rule(name=NAMES, version=st.integers(1, 3))
    def change_files(self, name: str, version: int) -> None:
        self.num_changes += 1
        (self.root / name / str(version)).mkdir(exist_ok=True)
        (self.root / name / str(version) / "weights").write_bytes(b"x" * self.num_changes)

    @rule(name=NAMES, config=st.sampled_from(CONFIGS))
    def change_config(self, name: str, config: str) -> None:
        (self.root / name / "config.pbtxt").write_text(config)

    @rule(name=NAMES, version=st.integers(1, 3), is_failing=st.booleans())
    def break_or_mend(self, name: str, version: int, is_failing: bool) -> None:
        if is_failing:
            self.loader.fail(name, version)
        else:
            self.loader.failures.pop((name, version), None)

    @rule(name=NAMES, value=st.integers(0, 1000))
    def ask(self, name: str, value: int) -> None:
        self.runner.run(self.submit(name, value))

    async def submit(self, name: str, value: int) -> None:
        """Have a request accepted, if a version is ready: from here on it must be answered."""
        if not self.repository.ready_versions(name):
            return
        request = identity_request(name, value)
        model = self.repository.get(name, None)
        model.signature.check(request)
        stream = model.submit(request)

        async def read() -> None:
            response = await stream.only()
            assert response.outputs[0].data.tolist() == [[value, value]]

        self.answers.add(asyncio.get_running_loop().create_task(read()))

    @rule(num_turns=st.integers(1, 20))
    def turn(self, num_turns: int) -> None:
        async def turn() -> None:
            for _ in range(num_turns):
                await asyncio.sleep(0)

        self.runner.run(turn())

    @precondition(lambda self: self.operations or self.answers)
    @rule()
    def settle(self) -> None:
        self.runner.run(self.finish())

    async def finish(self) -> None:
        """Wait for everything; a request that was accepted has its answer, an operation its end."""
        async with asyncio.timeout(20):
            await asyncio.gather(*self.answers)
            results = await asyncio.gather(*self.operations, return_exceptions=True)
            for lifecycle in self.repository._lifecycles.values():
                await lifecycle.wait_idle()
        assert all(result is None or isinstance(result, ServerError) for result in results), results
        self.answers.clear()
        self.operations.clear()
        ready = {(model.name, model.version): model for model in self.repository.models()}
        still_open = [model for model in self.loader.loaded if model not in self.loader.closed]
        assert sorted(map(id, still_open)) == sorted(map(id, ready.values())), "an open model serves, and no other"
        states = {row.state for row in self.repository.index()}
        assert states <= {ModelState.READY, ModelState.UNAVAILABLE, ModelState.UNKNOWN}

    @invariant()
    def the_look_up_and_the_index_agree(self) -> None:
        ready = {(row.name, row.version) for row in self.repository.index() if row.state is ModelState.READY}
        for name in ("a", "b"):
            versions = self.repository.ready_versions(name)
            assert {version for ready_name, version in ready if ready_name == name} == set(versions)
            if versions:
                assert self.repository.get(name, None) is self.repository.get(name, max(versions))
                continue
            try:
                self.repository.get(name, None)
            except (NotFoundError, UnavailableError):
                continue
            raise AssertionError("a model without ready versions was found")

    def teardown(self) -> None:
        async def stop() -> None:
            await self.repository.stop(10)
            await asyncio.gather(*self.answers)
            await asyncio.gather(*self.operations, return_exceptions=True)

        self.runner.run(stop())
        assert sorted(map(id, self.loader.closed)) == sorted(map(id, self.loader.loaded))
        self.runner.close()
        self.directory.cleanup()
        self.kept.cleanup()


Interleavings.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestInterleavings = Interleavings.TestCase
