"""Ensembles and their models in a repository: loading, unloading, replacing, draining."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gate import until
from support.repositories import IDENTITY_CONFIG, GatedLoader, open_repository, write_model
from support.sequences import write_sequence_model

from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Tensor
from modelserver.errors import ConfigError, InvalidArgumentError, ServerError, UnavailableError, UnloadedError
from modelserver.repository.options import ControlMode
from modelserver.repository.repository import ModelRepository

SLOW = 'parameters { key: "execute_delay_ms" value { string_value: "40" } }'


def write_ensemble(
    root: Path,
    name: str,
    models: Sequence[str],
    *,
    of_ensembles: bool = False,
    version: int = -1,
    datatype: str = "TYPE_INT32",
    extra: str = "",
) -> Path:
    """An ensemble that is a chain of identity models, or of such ensembles."""
    source, target = ("IN", "OUT") if of_ensembles else ("INPUT0", "OUTPUT0")
    steps = ",".join(
        f'{{ model_name: "{model}" model_version: {version} '
        f'input_map {{ key: "{source}" value: "{"IN" if position == 0 else f"t{position}"}" }} '
        f'output_map {{ key: "{target}" value: "{"OUT" if position == len(models) - 1 else f"t{position + 1}"}" }} }}'
        for position, model in enumerate(models)
    )
    config = f"""
platform: "ensemble"
max_batch_size: 8
input [ {{ name: "IN", data_type: {datatype}, dims: [ -1 ] }} ]
output [ {{ name: "OUT", data_type: {datatype}, dims: [ -1 ] }} ]
ensemble_scheduling {{ step [ {steps} ] }}
"""
    return write_model(root, name, config=config, extra=extra)


def request(name: str, value: int = 1) -> InFlightRequest:
    data = np.full((1, 2), value, dtype=np.int32)
    return InFlightRequest(model_name=name, version=None, inputs={"IN": Tensor("IN", Datatype.INT32, data)})


async def ask(repository: ModelRepository, name: str, value: int = 1) -> InferResponse:
    asked = request(name, value)
    response = await repository.get(name, None).infer(asked).only()
    assert response.outputs[0].data.tolist() == [[value, value]]
    return response


def states(repository: ModelRepository) -> Mapping[str, str]:
    return {row.name: row.state.value for row in repository.index() if row.version is not None}


def reason(repository: ModelRepository, name: str) -> str:
    [row] = [row for row in repository.index() if row.name == name]
    return row.reason


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Models a and b, and the ensemble e of both."""
    write_model(tmp_path, "a")
    write_model(tmp_path, "b")
    write_ensemble(tmp_path, "e", ["a", "b"])
    return tmp_path


async def test_an_ensemble_brings_its_models(pair: Path) -> None:
    async with open_repository(pair) as repository:
        await repository.load("e")
        assert states(repository) == {"a": "READY", "b": "READY", "e": "READY"}
        await ask(repository, "e")
        for name in ("e", "a", "b"):
            assert repository.get(name, None).statistics.snapshot().success.count == 1


@pytest.mark.parametrize("mode", [ControlMode.NONE, ControlMode.POLL])
async def test_at_the_start_everything_comes_in_the_right_order(pair: Path, mode: ControlMode) -> None:
    write_ensemble(pair, "above", ["e", "e"], of_ensembles=True)
    loader = GatedLoader()
    async with open_repository(pair, loader=loader, control_mode=mode) as repository:
        assert states(repository) == dict.fromkeys(("a", "above", "b", "e"), "READY")
        await ask(repository, "above")
        assert sorted(model.name for model in loader.loaded) == ["a", "above", "b", "e"]


async def test_unloading_the_ensemble_leaves_its_models_or_takes_them_along(pair: Path) -> None:
    write_ensemble(pair, "other", ["b"])
    async with open_repository(pair) as repository:
        await repository.load("e")
        await repository.unload("e")
        assert repository.ready_versions("a") == (1,)
        await repository.load("e")
        await repository.load("other")
        await repository.unload("e", unload_dependents=True)
        assert repository.ready_versions("a") == ()
        assert repository.ready_versions("b") == (1,)  # another ensemble needs it
        await ask(repository, "other")


async def test_dependents_of_dependents_go_too(pair: Path) -> None:
    write_ensemble(pair, "above", ["e"], of_ensembles=True)
    async with open_repository(pair) as repository:
        await repository.load("above")
        await repository.unload("above", unload_dependents=True)
        assert not list(repository.models())


async def test_an_ensemble_is_not_ready_while_one_of_its_models_is_not(pair: Path) -> None:
    write_ensemble(pair, "above", ["e"], of_ensembles=True)
    async with open_repository(pair) as repository:
        await repository.load("above")
        model = repository.get("e", None)
        await ask(repository, "above")
        await repository.unload("a")
        assert states(repository)["e"] == states(repository)["above"] == "UNAVAILABLE"
        assert reason(repository, "e") == "step[0] needs model 'a', which is not ready"
        assert reason(repository, "above") == "step[0] needs model 'e', which is not ready"
        with pytest.raises(UnavailableError, match="step\\[0\\] needs model 'e'"):
            repository.get("above", None)
        assert repository.is_ready(strict=True)  # it was unloaded on request
        await repository.load("a")
        assert states(repository)["above"] == "READY"
        await ask(repository, "above")
        assert repository.get("e", None) is model
        assert model.statistics.snapshot().success.count == 2


async def test_what_is_missing_or_broken_is_said_with_its_place(tmp_path: Path) -> None:
    write_model(tmp_path, "b", config="max_batch_size: 8")
    write_ensemble(tmp_path, "e", ["a", "b"])
    async with open_repository(tmp_path) as repository:
        with pytest.raises(InvalidArgumentError) as caught:
            await repository.load("e")
        message = caught.value.message
        assert "config.pbtxt:6:32: ensemble_scheduling.step[0].model_name: there is no model 'a'" in message
        assert "step[1].model_name: cannot load model 'b'" in message
        assert not isinstance(caught.value, ConfigError)
        assert "a" not in states(repository)
        write_model(tmp_path, "a")
        write_model(tmp_path, "b")
        await repository.load("e")
        await ask(repository, "e")


async def test_models_that_do_not_fit_keep_an_ensemble_from_loading(pair: Path) -> None:
    write_ensemble(pair, "wrong", ["a", "b"], datatype="TYPE_FP32")
    async with open_repository(pair) as repository:
        with pytest.raises(InvalidArgumentError, match="2 problems") as caught:
            await repository.load("wrong")
        assert "input 'INPUT0' of model 'a' has datatype INT32, but tensor 'IN' is FP32" in caught.value.message
        assert states(repository)["wrong"] == "UNAVAILABLE" if "wrong" in states(repository) else True
        assert states(repository)["a"] == "READY"


async def test_an_ensemble_may_not_contain_itself(tmp_path: Path) -> None:
    write_ensemble(tmp_path, "one", ["two"], of_ensembles=True)
    write_ensemble(tmp_path, "two", ["three"], of_ensembles=True)
    write_ensemble(tmp_path, "three", ["one"], of_ensembles=True)
    for mode in (ControlMode.EXPLICIT, ControlMode.NONE):
        async with asyncio.timeout(20), open_repository(tmp_path, control_mode=mode) as repository:
            if mode is ControlMode.EXPLICIT:
                with pytest.raises(ServerError, match=r"ensembles contain each other: .* -> .* -> "):
                    await repository.load("one")
            assert not list(repository.models())


async def test_a_model_that_becomes_an_ensemble_of_its_own_ensemble_is_refused(pair: Path) -> None:
    async with open_repository(pair) as repository:
        await repository.load("e")
        write_ensemble(pair, "a", ["e"], of_ensembles=True)
        with pytest.raises(ConfigError, match="ensembles contain each other: a -> e -> a"):
            await repository.load("a")
        await ask(repository, "e")


async def test_versions_of_steps(pair: Path) -> None:
    write_model(pair, "a", versions=(1, 2), extra="version_policy { all { } }")
    write_ensemble(pair, "first", ["a"], version=1)
    write_ensemble(pair, "third", ["a"], version=3)
    async with open_repository(pair) as repository:
        await repository.load("e")
        await repository.load("first")
        await ask(repository, "e")
        await ask(repository, "first")
        counts = [repository.get("a", version).statistics.snapshot().success.count for version in (1, 2)]
        assert counts == [1, 1]
        with pytest.raises(ServerError, match="step\\[0\\] needs model 'a' version 3, which is not ready"):
            await repository.load("third")
        await repository.unload("a", version=2)  # the latest is another one now
        await ask(repository, "e")
        await repository.unload("a", version=1)
        assert states(repository)["first"] == "UNAVAILABLE"


async def test_a_reloaded_model_that_no_longer_fits_stops_the_ensemble_until_it_does(pair: Path) -> None:
    async with open_repository(pair) as repository:
        await repository.load("e")
        write_model(pair, "b", config=IDENTITY_CONFIG.replace("INT32", "FP32"))
        await repository.load("b")
        assert "input 'INPUT0' of model 'b' has datatype FP32" in reason(repository, "e")
        assert not repository.is_ready(strict=True)
        with pytest.raises(UnavailableError, match="has datatype FP32"):
            repository.get("e", None)
        write_model(pair, "b")
        await repository.load("b")
        assert repository.is_ready(strict=True)
        await ask(repository, "e")


async def test_requests_go_on_while_their_models_are_replaced(pair: Path) -> None:
    """Each reload of a model swaps it under the ensemble; a request ends with the models that it began with."""
    for name in ("a", "b"):
        write_model(pair, name, extra=SLOW)
    async with open_repository(pair) as repository:
        await repository.load("e")
        is_over = False

        async def traffic() -> int:
            num_answers = 0
            while not is_over:
                await ask(repository, "e", num_answers)
                num_answers += 1
            return num_answers

        clients = [asyncio.create_task(traffic()) for _ in range(4)]
        for number in range(4):
            for name in ("a", "b"):
                write_model(pair, name, extra=f'{SLOW} metric_tags {{ key: "round" value: "{number}" }}')
                await repository.load(name)
        is_over = True
        assert sum(await asyncio.gather(*clients)) > 0


@pytest.mark.parametrize("what", ["e", "a", "b", "all"])
async def test_what_was_accepted_is_answered_after_unloads(pair: Path, what: str) -> None:
    write_model(pair, "a", extra=SLOW)
    loader = GatedLoader()
    async with open_repository(pair, loader=loader) as repository:
        await repository.load("e")
        streams = [repository.get("e", None).infer(request("e", value)) for value in range(3)]
        assert repository.get("e", None).inflight == 3
        for name in ("b", "a", "e") if what == "all" else (what,):
            await repository.unload(name)
        answers = await asyncio.gather(*(stream.only() for stream in streams))
        assert [answer.outputs[0].data[0, 0] for answer in answers] == [0, 1, 2]


async def test_the_end_of_the_server_waits_for_the_last_step(pair: Path) -> None:
    write_model(pair, "a", extra=SLOW)
    loader = GatedLoader()
    async with open_repository(pair, loader=loader) as repository:
        await repository.load("e")
        stream = repository.get("e", None).infer(request("e"))
    assert (await stream.only()).error is None
    assert {model.name for model in loader.closed} == {"a", "b", "e"}


async def test_outputs_and_config_of_an_ensemble_with_a_decoupled_model(tmp_path: Path) -> None:
    repeat: Any = """
backend: "repeat"
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] },
        { name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "IDX" data_type: TYPE_UINT32 dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
"""
    write_model(tmp_path, "many", config=repeat)
    write_model(
        tmp_path,
        "e",
        config="""
platform: "ensemble"
input [ { name: "VALUES" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] },
        { name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] } ]
output [ { name: "VALUE" data_type: TYPE_INT32 dims: [ 1 ] } ]
ensemble_scheduling { step [ { model_name: "many" model_version: -1
  input_map [ { key: "IN" value: "VALUES" }, { key: "DELAY" value: "DELAY" }, { key: "WAIT" value: "WAIT" } ]
  output_map { key: "OUT" value: "VALUE" } } ] }
""",
    )
    async with open_repository(tmp_path) as repository:
        await repository.load("e")
        model = repository.get("e", None)
        assert model.is_decoupled
        assert model.config.is_decoupled
        inputs = {
            "VALUES": Tensor("VALUES", Datatype.INT32, np.array([4, 5, 6], np.int32)),
            "DELAY": Tensor("DELAY", Datatype.UINT32, np.zeros(3, np.uint32)),
            "WAIT": Tensor("WAIT", Datatype.UINT32, np.zeros(1, np.uint32)),
        }
        stream = model.infer(InFlightRequest(model_name="e", version=None, inputs=inputs))
        responses = [response async for response in stream]
        values = [[output.data.tolist() for output in response.outputs] for response in responses]
        assert values == [[[4]], [[5]], [[6]], []]
        assert [response.is_final for response in responses] == [False, False, False, True]


async def test_an_ensemble_finds_the_models_of_its_own_namespace_first(tmp_path: Path) -> None:
    roots = [tmp_path / "one", tmp_path / "two"]
    for root in roots:
        write_model(root, "a")
        write_ensemble(root, "e", ["a"])
    write_model(roots[1], "only")
    write_ensemble(roots[0], "far", ["only"])
    async with open_repository(*roots, has_namespaces=True) as repository:
        await repository.load("e", repository="two")
        assert [(model.name, model.namespace) for model in repository.models()] == [
            ("a", str(roots[1])),
            ("e", str(roots[1])),
        ]
        await repository.load("e", repository="one")
        own = repository.get("one::a", None)
        await ask(repository, "one::e")
        assert own.statistics.snapshot().success.count == 1
        await repository.load("only", repository="two")
        await repository.load("far", repository="one")
        await ask(repository, "far")


async def test_a_sequence_goes_on_where_it_began(tmp_path: Path) -> None:
    write_sequence_model(tmp_path, "sums", "oldest { }", versions=(1,))
    config = """
platform: "ensemble"
max_batch_size: 4
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
ensemble_scheduling { step [ { model_name: "sums" model_version: -1
  input_map { key: "INPUT" value: "IN" } output_map { key: "OUTPUT" value: "OUT" } } ] }
"""
    write_model(tmp_path, "e", config=config)

    async def add(repository: ModelRepository, number: int, flags: str) -> int:
        data = np.array([[number]], np.int32)
        asked = InFlightRequest(
            model_name="e",
            version=None,
            inputs={"IN": Tensor("IN", Datatype.INT32, data)},
            sequence_id=7,
            sequence_start="+" in flags,
            sequence_end="-" in flags,
        )
        response = await repository.get("e", None).infer(asked).only()
        return int(response.outputs[0].data.item())

    async with open_repository(tmp_path) as repository:
        await repository.load("e")
        assert await add(repository, 1, "+") == 1
        write_sequence_model(tmp_path, "sums", "oldest { }", versions=(2,))
        await repository.load("sums")
        assert repository.ready_versions("sums") == (2,)
        assert await add(repository, 2, "") == 3
        assert await add(repository, 3, "-") == 6
        assert await add(repository, 5, "+-") == 5


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_comes_and_goes_an_answer_is_right_or_the_request_is_refused(pair: Path, seed: int) -> None:
    write_ensemble(pair, "above", ["e", "e"], of_ensembles=True)
    order = random.Random(seed)
    loader = GatedLoader()
    async with open_repository(pair, loader=loader) as repository:
        await repository.load("above")
        num_answers = num_refusals = 0
        is_over = False

        async def traffic() -> None:
            nonlocal num_answers, num_refusals
            while not is_over:
                try:
                    model = repository.get("above", None)
                except (UnavailableError, UnloadedError):
                    num_refusals += 1
                else:
                    asked = request("above", num_answers)
                    response = await model.infer(asked).only()  # once accepted it is answered
                    assert response.outputs[0].data.tolist() == [asked.inputs["IN"].data[0].tolist()]
                    num_answers += 1
                await asyncio.sleep(0.001)

        clients = [asyncio.create_task(traffic()) for _ in range(3)]
        for number in range(25):
            name = order.choice(["a", "b", "e", "above"])
            if name in ("a", "b"):
                write_model(pair, name, extra=f'metric_tags {{ key: "round" value: "{number}" }}')
            match order.choice(["load", "load", "unload", "unload all"]):
                case "load":
                    await repository.load(name)
                case "unload":
                    await repository.unload(name)
                case "unload all":
                    await repository.unload(name, unload_dependents=True)
            await asyncio.sleep(0.002)
        await repository.load("above")
        await ask(repository, "above")
        is_over = True
        await asyncio.gather(*clients)
        assert num_answers
        assert states(repository)["above"] == "READY"


async def test_an_output_has_the_labels_of_the_model_that_writes_it(pair: Path) -> None:
    named = IDENTITY_CONFIG.replace('name: "OUTPUT0"', 'name: "OUTPUT0" label_filename: "words.txt"')
    (write_model(pair, "b", config=named) / "words.txt").write_text("no\nyes\n")
    async with open_repository(pair) as repository:
        await repository.load("e")
        assert repository.get("e", None).labels == {"OUT": ("no", "yes")}
        write_model(pair, "b")
        await repository.load("b")
        assert repository.get("e", None).labels == {}


async def test_polling_follows_the_models_of_an_ensemble(tmp_path: Path) -> None:
    write_model(tmp_path, "b")
    write_ensemble(tmp_path, "e", ["a", "b"])
    options = {"control_mode": ControlMode.POLL, "poll_interval_s": 0.02}

    async def until_ready(repository: ModelRepository, *, is_ready: bool) -> None:
        await until(lambda: (repository.ready_versions("e") == (1,)) is is_ready, "the ensemble follows")

    async with open_repository(tmp_path, **options) as repository:
        assert "there is no model 'a'" in reason(repository, "e")
        write_model(tmp_path, "a")
        await until_ready(repository, is_ready=True)
        await ask(repository, "e")
        shutil.rmtree(tmp_path / "a")
        await until_ready(repository, is_ready=False)
        assert reason(repository, "e") == "step[0] needs model 'a', which is not ready"
        write_model(tmp_path, "a")
        await until_ready(repository, is_ready=True)
        await ask(repository, "e")


async def test_a_new_version_policy_is_no_reload(pair: Path) -> None:
    loader = GatedLoader()
    async with open_repository(pair, loader=loader) as repository:
        await repository.load("e")
        model = repository.get("e", None)
        path = pair / "e" / "config.pbtxt"
        path.write_text(path.read_text() + "version_policy { all { } }")
        await repository.load("e")
        assert repository.get("e", None) is model
        assert model.config.version_policy is not None
        assert model.config.version_policy.all is not None
        await ask(repository, "e")


async def test_an_ensemble_and_its_models_may_change_in_one_moment(pair: Path) -> None:
    options = {"control_mode": ControlMode.POLL, "poll_interval_s": 0.02}
    async with open_repository(pair, **options) as repository:
        await ask(repository, "e")
        for name in ("a", "b"):
            write_model(pair, name, config=IDENTITY_CONFIG.replace("INT32", "INT64"))
        write_ensemble(pair, "e", ["a", "b"], datatype="TYPE_INT64")

        def datatype() -> Datatype | None:
            versions = repository.ready_versions("e")
            return repository.get("e", None).config.input[0].data_type if versions else None

        await until(lambda: datatype() is Datatype.INT64, "the new ensemble serves")
        data = np.full((1, 2), 5, dtype=np.int64)
        asked = InFlightRequest(model_name="e", version=None, inputs={"IN": Tensor("IN", Datatype.INT64, data)})
        assert (await repository.get("e", None).infer(asked).only()).outputs[0].data.tolist() == [[5, 5]]


async def test_an_ensemble_that_does_not_fit_yet_is_tried_again(pair: Path) -> None:
    options = {"control_mode": ControlMode.POLL, "poll_interval_s": 0.02}
    async with open_repository(pair, **options) as repository:
        write_ensemble(pair, "e", ["a", "b"], datatype="TYPE_INT64")
        await until(lambda: "has datatype INT32" in reason(repository, "e"), "the ensemble does not fit")
        await ask(repository, "e")  # the old one serves on
        assert repository.is_ready(strict=True)
        for name in ("a", "b"):
            write_model(pair, name, config=IDENTITY_CONFIG.replace("INT32", "INT64"))

        def is_new() -> bool:
            versions = repository.ready_versions("e")
            return bool(versions) and repository.get("e", None).config.input[0].data_type is Datatype.INT64

        await until(is_new, "the new ensemble serves")


async def test_all_problems_of_an_ensemble_come_at_once(pair: Path) -> None:
    async with open_repository(pair) as repository:
        await repository.load("e")
        write_ensemble(pair, "wrong", ["a", "b"], datatype="TYPE_FP32", extra="instance_group { }")
        with pytest.raises(ConfigError) as caught:
            await repository.load("wrong")
        assert len(caught.value.problems) == 3


async def test_steps_of_ensembles_within_ensembles_are_counted(tmp_path: Path) -> None:
    write_model(tmp_path, "a", config=IDENTITY_CONFIG)
    write_ensemble(tmp_path, "e1", ["a"] * 16)
    write_ensemble(tmp_path, "e2", ["e1"] * 16, of_ensembles=True)
    write_ensemble(tmp_path, "small", ["e1"] * 15, of_ensembles=True)
    async with open_repository(tmp_path) as repository:
        await repository.load("small")
        with pytest.raises(ServerError, match="256 steps, including the steps of nested ensembles, got 272") as refused:
            await repository.load("e2")
        assert "--config-limits=ensemble_steps=272 allows it" in refused.value.message
        assert repository.ready_versions("small") == (1,)
        assert repository.ready_versions("e2") == ()
