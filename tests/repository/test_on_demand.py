"""Models on demand: loaded once for all requests, evicted when idle or for others, withheld after an unload request."""

import asyncio
import shutil
from math import inf
from pathlib import Path

import pytest
from support.gate import until
from support.repositories import GatedLoader, identity_request, infer, open_repository, write_model

from modelserver.errors import (
    InternalError,
    InvalidArgumentError,
    LoadOnDemandError,
    NotFoundError,
    ServerError,
    UnavailableError,
    UnloadedError,
)
from modelserver.repository.options import ControlMode, DemandOptions
from modelserver.repository.repository import ModelRepository

NONE, POLL = ControlMode.NONE, ControlMode.POLL
ON = DemandOptions(is_on=True)


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def unloaded_error(repository: ModelRepository, name: str, version: int | None = None) -> LoadOnDemandError:
    with pytest.raises(LoadOnDemandError) as caught:
        repository.get(name, version)
    return caught.value


async def load(repository: ModelRepository, *names: str) -> None:
    for name in names:
        await unloaded_error(repository, name).load()
        await infer(repository, name)


def ready(repository: ModelRepository) -> list[str]:
    return [model.name for model in repository.models()]


def reasons(repository: ModelRepository) -> dict[str, str]:
    return {row.name: row.reason for row in repository.index()}


async def test_models_sleep_until_they_are_asked_for(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    write_model(tmp_path, "b")
    write_model(tmp_path, "pinned", extra=parameter("pinned", "true"))
    write_model(tmp_path, "eager", extra=parameter("load_on_demand", "false"))
    async with open_repository(tmp_path, control_mode=NONE, demand=ON) as repository:
        assert ready(repository) == ["eager", "pinned"]
        assert repository.is_ready(strict=True)
        assert reasons(repository)["a"] == "not in memory: loaded on demand"
        await load(repository, "a")
        assert ready(repository) == ["a", "eager", "pinned"]


async def test_one_model_may_be_on_demand_alone(tmp_path: Path) -> None:
    write_model(tmp_path, "lazy", extra=parameter("load_on_demand", "true"))
    write_model(tmp_path, "eager")
    activated: list[bool] = []
    async with open_repository(tmp_path, control_mode=NONE) as repository:
        repository.on_demand.on_active = lambda: activated.append(True)
        assert ready(repository) == ["eager"]
        assert repository.on_demand.is_active
        await load(repository, "lazy")


async def test_all_who_ask_share_one_load(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    loader = GatedLoader()
    async with open_repository(tmp_path, loader=loader, control_mode=NONE, demand=ON) as repository:
        loader.hold("a")
        waiting = [asyncio.create_task(unloaded_error(repository, "a").load()) for _ in range(5)]
        await loader.reached("a")
        waiting[0].cancel()  # who leaves does not end the load of the others
        loader.release("a")
        await asyncio.gather(*waiting[1:])
        assert loader.num_attempts == 1
        assert repository.on_demand.counts().loads == {"a": 1}


@pytest.mark.parametrize("version", [None, 2])
async def test_what_is_not_there_loads_nothing(tmp_path: Path, version: int | None) -> None:
    write_model(tmp_path, "a")
    async with open_repository(tmp_path, control_mode=NONE, demand=ON) as repository:
        with pytest.raises(ServerError) as caught:
            repository.get("missing" if version is None else "a", version)
        if isinstance(caught.value, LoadOnDemandError):  # the disk is looked at once, and then not for a while
            with pytest.raises(NotFoundError):
                await caught.value.load()
            with pytest.raises(NotFoundError):
                repository.get("missing", None)
        assert ready(repository) == []


async def test_a_model_that_was_put_there_is_found(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    async with open_repository(tmp_path, demand=ON) as repository:
        write_model(tmp_path, "new")
        await load(repository, "new")
        assert ready(repository) == ["new"]


async def test_idle_models_leave_and_come_back(tmp_path: Path) -> None:
    write_model(tmp_path, "a", extra=parameter("keep_alive", "50ms"))
    write_model(tmp_path, "b", extra=parameter("keep_alive", "-1"))
    async with open_repository(tmp_path, control_mode=NONE, demand=ON) as repository:
        await load(repository, "a", "b")
        await until(lambda: ready(repository) == ["b"], "the idle model left")
        assert repository.on_demand.counts().evictions == {("a", "idle"): 1}
        await until(lambda: "idle" in reasons(repository)["a"], "it was closed")
        await load(repository, "a")


async def test_requests_in_flight_keep_a_model(tmp_path: Path) -> None:
    write_model(tmp_path, "a", extra=parameter("keep_alive", "0"))
    async with open_repository(tmp_path, control_mode=NONE, demand=ON) as repository:
        await unloaded_error(repository, "a").load()
        model = repository.get("a", None)
        model.hold()
        await asyncio.sleep(0.2)
        assert ready(repository) == ["a"]
        assert not repository._lifecycles["a"].evict()
        model.release()
        await until(lambda: not ready(repository), "it left")


async def test_the_least_recently_used_makes_room(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_model(tmp_path, name, extra=parameter("resident_bytes", "40"))
    demand = DemandOptions(is_on=True, keep_alive_s=inf, budget_bytes=100)
    async with open_repository(tmp_path, control_mode=NONE, demand=demand) as repository:
        await load(repository, "a", "b")
        repository.get("a", None).last_use_ns += 10**12
        await load(repository, "c")
        assert ready(repository) == ["a", "c"]
        assert repository.on_demand.counts().evictions == {("b", "memory"): 1}
        assert {model.key: model.num_bytes for model in repository.on_demand.lru.all()} == {"a": 40, "c": 40}


async def test_who_waited_is_served_before_the_model_makes_room(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_model(tmp_path, name, extra=parameter("resident_bytes", "80"))
    demand = DemandOptions(is_on=True, keep_alive_s=inf, budget_bytes=100)

    async def load_and_infer(name: str) -> None:
        await unloaded_error(repository, name).load()
        await infer(repository, name)  # it has not left again

    async with open_repository(tmp_path, control_mode=NONE, demand=demand) as repository:
        await asyncio.gather(*(load_and_infer(name) for name in ("a", "b") * 4))
        assert repository.on_demand.counts().loads == {"a": 1, "b": 1}


async def ask(repository: ModelRepository, name: str, number: int) -> None:
    """One request as the data plane sends it: wait for the model as often as it takes, at most five times."""
    for _ in range(5):
        try:
            model = repository.get(name, None)
        except LoadOnDemandError as error:
            await error.load()
            continue
        request = identity_request(name, number)
        model.signature.check(request)
        response = await model.submit(request).only()
        assert response.outputs[0].data.tolist() == [[number, number]]
        return
    raise AssertionError("the model left five times before the request was submitted")


@pytest.mark.parametrize("num_rounds", [30])
async def test_an_eviction_while_a_model_is_loaded_waits_for_those_who_asked(tmp_path: Path, num_rounds: int) -> None:
    """Whoever comes before, with or after it is answered, by one load; then the memory is free."""
    write_model(tmp_path, "a")
    loader = GatedLoader()
    async with open_repository(tmp_path, loader=loader, demand=ON) as repository:
        for number in range(num_rounds):
            loader.hold("a")
            asking = [asyncio.create_task(ask(repository, "a", number)) for _ in range(3)]
            await loader.reached("a")
            evicting = [asyncio.create_task(repository.unload("a", evicts=True)) for _ in range(1 + number % 2)]
            for _ in range(number % 5):
                await asyncio.sleep(0)
            asking += [asyncio.create_task(ask(repository, "a", number)) for _ in range(3)]
            await asyncio.sleep(0)
            loader.release("a")
            await asyncio.gather(*asking, *evicting)
            assert ready(repository) == []
            assert loader.num_attempts == repository.on_demand.counts().loads["a"] == number + 1


async def test_a_load_that_nobody_waits_for_gives_way_to_an_eviction(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    loader = GatedLoader()
    async with open_repository(tmp_path, loader=loader, demand=ON) as repository:
        loader.hold("a")
        waiting = asyncio.create_task(unloaded_error(repository, "a").load())
        await loader.reached("a")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        evicting = asyncio.create_task(repository.unload("a", evicts=True))
        await asyncio.sleep(0)
        late = asyncio.create_task(ask(repository, "a", 7))  # after it, while the load still goes on
        await asyncio.sleep(0)
        loader.release("a")
        await asyncio.gather(evicting, late)
        assert ready(repository) == ["a"]


async def test_an_unload_while_a_model_is_loaded_is_a_decision(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    loader = GatedLoader()
    async with open_repository(tmp_path, loader=loader, demand=ON) as repository:
        loader.hold("a")
        waiting = asyncio.create_task(unloaded_error(repository, "a").load())
        await loader.reached("a")
        unloading = asyncio.create_task(repository.unload("a"))
        await asyncio.sleep(0)
        loader.release("a")
        with pytest.raises(UnavailableError, match="superseded"):
            await waiting
        await unloading
        with pytest.raises(UnloadedError):
            repository.get("a", None)
        assert loader.num_attempts == 1
        await repository.load("a")
        await infer(repository, "a")


async def test_who_waits_for_a_load_that_is_superseded_gets_the_newer_one(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    loader = GatedLoader()
    async with open_repository(tmp_path, loader=loader, demand=ON) as repository:
        loader.hold("a")
        first = asyncio.create_task(unloaded_error(repository, "a").load())
        await loader.reached("a")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        evicting = asyncio.create_task(repository.unload("a", evicts=True))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(ask(repository, "a", 3))
        await asyncio.sleep(0)
        loading = [asyncio.create_task(repository.load("a")) for _ in range(2)]
        await asyncio.sleep(0)
        loader.release("a")
        outcomes = await asyncio.gather(waiting, evicting, *loading, return_exceptions=True)
        assert outcomes[0] is None
        assert all(isinstance(outcome, UnavailableError | None) for outcome in outcomes)
        assert ready(repository) == ["a"]


async def test_no_room_is_said_and_no_fault_of_the_model(tmp_path: Path) -> None:
    for name, size in (("a", "40"), ("b", "80"), ("huge", "101")):
        write_model(tmp_path, name, extra=parameter("resident_bytes", size))
    demand = DemandOptions(is_on=True, keep_alive_s=inf, budget_bytes=100, room_patience_s=0.0)
    async with open_repository(tmp_path, control_mode=NONE, demand=demand) as repository:
        with pytest.raises(UnavailableError, match="--on-demand-memory-budget"):
            await unloaded_error(repository, "huge").load()
        await load(repository, "a")
        repository.get("a", None).hold()
        with pytest.raises(UnavailableError, match="in use or pinned: a") as caught:
            await unloaded_error(repository, "b").load()
        assert caught.value.retry_after_s
        repository.get("a", None).release()
        await load(repository, "b")
        assert ready(repository) == ["b"]


def write_whole(root: Path, extra: str = "") -> None:
    """An ensemble `whole` of the model `part`."""
    write_model(root, "part", extra=extra)
    maps = 'input_map { key: "INPUT0" value: "x" } output_map { key: "OUTPUT0" value: "y" }'
    write_model(
        root,
        "whole",
        config=f"""
platform: "ensemble"
max_batch_size: 8
input [ {{ name: "x", data_type: TYPE_INT32, dims: [ -1 ] }} ]
output [ {{ name: "y", data_type: TYPE_INT32, dims: [ -1 ] }} ]
ensemble_scheduling {{ step {{ model_name: "part" model_version: -1 {maps} }} }}
{parameter("resident_bytes", "10")}""",
    )


async def test_an_ensembles_models_stay_while_it_does(tmp_path: Path) -> None:
    write_whole(tmp_path, parameter("keep_alive", "0"))
    async with open_repository(tmp_path, control_mode=NONE, demand=ON) as repository:
        await unloaded_error(repository, "whole").load()
        await asyncio.sleep(0.15)
        assert ready(repository) == ["part", "whole"]
        assert repository._lifecycles["whole"].evict()
        await until(lambda: not ready(repository), "its model left after it")


async def test_what_others_than_requests_load_takes_of_the_budget_too(tmp_path: Path) -> None:
    """At start, by a load request, as a step of an ensemble."""
    for name in ("started", "asked", "late"):
        write_model(tmp_path, name, extra=parameter("resident_bytes", "40"))
    write_whole(tmp_path, parameter("resident_bytes", "50"))
    demand = DemandOptions(is_on=True, keep_alive_s=inf, budget_bytes=100)
    async with open_repository(tmp_path, load_models=("started",), demand=demand) as repository:
        await repository.load("asked")
        await infer(repository, "asked")
        await load(repository, "late")
        assert ready(repository) == ["asked", "late"]
        await unloaded_error(repository, "whole").load()
        taken = {model.key: model.num_bytes for model in repository.on_demand.lru.all()}
        assert (taken["part"], taken["whole"]) == (50, 10)
        await load(repository, "started")
        assert ready(repository) == ["part", "started", "whole"]


async def test_all_models_at_start_are_those_that_do_not_sleep(tmp_path: Path) -> None:
    write_model(tmp_path, "eager")
    write_model(tmp_path, "lazy", extra=parameter("load_on_demand", "true"))
    for named, expected in ((("*",), ["eager"]), (("lazy",), ["lazy"])):
        async with open_repository(tmp_path, load_models=named) as repository:
            assert ready(repository) == expected


async def test_a_load_that_fails_is_not_tried_at_once_again(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    loader = GatedLoader()
    loader.fail("a", 1, InternalError("out of memory"))
    async with open_repository(tmp_path, loader=loader, demand=ON) as repository:
        with pytest.raises(UnavailableError, match="out of memory") as told:
            await unloaded_error(repository, "a").load()
        assert told.value.retry_after_s == 1.0
        with pytest.raises(UnavailableError, match=r"could not be loaded on demand, 1 times.*out of memory") as caught:
            repository.get("a", None)
        assert 0 < (caught.value.retry_after_s or 0) <= 1
        assert not isinstance(caught.value, LoadOnDemandError)
        loader.failures.clear()
        await repository.load("a")  # an explicit load does not wait
        await infer(repository, "a")


async def test_what_was_unloaded_by_request_stays_so(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    async with open_repository(tmp_path, demand=ON) as repository:
        await load(repository, "a")
        await repository.unload("a")
        with pytest.raises(UnavailableError, match=r"unloaded|UNLOADING") as caught:
            repository.get("a", None)
        assert not isinstance(caught.value, LoadOnDemandError)
        await repository.load("a")
        await repository.unload("a", evicts=True)
        await load(repository, "a")


async def test_what_was_removed_is_not_found_from_the_unload_on(tmp_path: Path) -> None:
    """Also while the removed model still answers requests."""
    directory = write_model(tmp_path, "a")
    async with open_repository(tmp_path, demand=ON) as repository:
        await load(repository, "a")
        shutil.rmtree(directory)
        repository.index()  # looks at the disk
        await repository.unload("a")
        with pytest.raises(UnloadedError, match="it was removed"):
            repository.get("a", None)


async def test_the_unload_of_a_version_withholds_a_model_only_with_its_last_one(tmp_path: Path) -> None:
    write_model(tmp_path, "a", versions=(1, 2), extra="version_policy { all { } }")
    async with open_repository(tmp_path, demand=ON) as repository:
        await repository.load("a")
        await repository.unload("a", evicts=True)
        await repository.unload("a", version=2)  # which is not loaded: nothing happens
        await load(repository, "a")
        await repository.unload("a", version=2)
        assert repository.ready_versions("a") == (1,)
        await repository.unload("a", version=1)
        with pytest.raises(UnavailableError) as caught:
            repository.get("a", None)
        assert not isinstance(caught.value, LoadOnDemandError)


async def test_a_load_says_how_long_a_model_stays(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    write_model(tmp_path, "eager", extra=parameter("load_on_demand", "false"))
    async with open_repository(tmp_path, demand=ON) as repository:
        await repository.load("a", keep_alive_s=0.05)
        await until(lambda: not ready(repository), "it left")
        await repository.load("eager")
        with pytest.raises(InvalidArgumentError, match="keep_alive"):
            await repository.load("eager", keep_alive_s=1.0)


async def test_polling_leaves_unloaded_models_alone(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    async with open_repository(tmp_path, control_mode=POLL, poll_interval_s=3600.0, demand=ON) as repository:
        write_model(tmp_path, "a", versions=(1, 2))
        for _ in range(3):
            await repository._poller.poll_once()
            await repository._poller.wait_idle()
        assert ready(repository) == []
        await load(repository, "a")
        assert [model.version for model in repository.models()] == [2]


async def test_many_who_come_and_go(tmp_path: Path) -> None:
    """Random loads under a budget for two of four: every request is answered, and no more than two are there."""
    for name in "abcd":
        write_model(tmp_path, name, extra=parameter("resident_bytes", "50"))
    demand = DemandOptions(is_on=True, keep_alive_s=inf, budget_bytes=100)

    async def come(repository: ModelRepository, number: int) -> None:
        await ask(repository, "abcd"[(number * 7) % 4], number)
        assert len(ready(repository)) <= 2

    async with open_repository(tmp_path, control_mode=NONE, demand=demand) as repository:
        await asyncio.gather(*(come(repository, number) for number in range(40)))


async def test_what_would_not_come_back_as_it_is_stays(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    override = '{"backend": "identity", "max_batch_size": 3, "parameters": {"keep_alive": {"string_value": "0"}}}'
    async with open_repository(tmp_path, demand=ON) as repository:
        await repository.load("a", config_json=override)
        await asyncio.sleep(0.15)
        assert repository.get("a", None).config.max_batch_size == 3
        await repository.load("a", keep_alive_s=0.0, drops_override=True)
        await until(lambda: not ready(repository), "what is on disk may leave")


async def test_a_model_that_asks_for_another_while_it_is_loaded_gets_it(tmp_path: Path) -> None:
    """With a budget loads go one by one, and this one would wait for itself."""
    for name in ("outer", "inner"):
        write_model(tmp_path, name, extra=parameter("resident_bytes", "10"))
    loader = GatedLoader()
    demand = DemandOptions(is_on=True, keep_alive_s=inf, budget_bytes=100, room_patience_s=0.05)
    async with open_repository(tmp_path, loader=loader, control_mode=NONE, demand=demand) as repository:
        loader.hold("outer")
        outer = asyncio.create_task(unloaded_error(repository, "outer").load())
        await loader.reached("outer")
        await load(repository, "inner")
        loader.release("outer")
        await outer
        assert ready(repository) == ["inner", "outer"]
