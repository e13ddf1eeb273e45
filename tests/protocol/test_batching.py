"""Dynamic batching as clients meet it: which requests share a batch, who goes first, and who is refused."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from support.async_clients import AsyncClient
from support.clients import ClientError
from support.gate import BACKEND_DIRECTORY, GatedModel, until, write_gated
from support.serving import RunningServer, running_server

from modelserver.auth.access import OBJECTIVE_HEADER
from modelserver.errors import ErrorCode

pytestmark = pytest.mark.one_layout

# Name -> max_batch_size and the rest of the config.
MODELS = {
    "plain": (4, "dynamic_batching { }"),
    "unbatched": (4, ""),
    "optional": (
        4,
        'dynamic_batching { } input [ { name: "INPUT1", data_type: TYPE_INT32, dims: [ -1 ], optional: true } ]',
    ),
    "ordered": (4, "dynamic_batching { preserve_ordering: true }"),
    "pair": (4, "dynamic_batching { } instance_group [ { kind: KIND_CPU count: 2 } ]"),
    "ordered_pair": (4, "dynamic_batching { preserve_ordering: true } instance_group [ { kind: KIND_CPU count: 2 } ]"),
    "preferred": (8, "dynamic_batching { preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 60000000 }"),
    "delayed": (8, "dynamic_batching { max_queue_delay_microseconds: 200000 }"),
    "patient": (3, "dynamic_batching { max_queue_delay_microseconds: 60000000 }"),
    "levels": (1, "dynamic_batching { priority_levels: 3 default_priority_level: 2 }"),
    "full": (1, "dynamic_batching { default_queue_policy { max_queue_size: 2 } }"),
    "full_level": (
        1,
        "dynamic_batching { priority_levels: 2 default_priority_level: 2 "
        "priority_queue_policy { key: 1 value { max_queue_size: 1 } } }",
    ),
    "impatient": (1, "dynamic_batching { default_queue_policy { default_timeout_microseconds: 100000 } }"),
    "override": (1, "dynamic_batching { default_queue_policy { allow_timeout_override: true } }"),
    "late": (
        1,
        "dynamic_batching { default_queue_policy { timeout_action: DELAY allow_timeout_override: true } }",
    ),
}


@pytest.fixture(scope="module")
def gated(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("gated")
    for name, (max_batch_size, more) in MODELS.items():
        write_gated(root, name, max_batch_size=max_batch_size, more=more)
    with running_server(root, backend_directory=(BACKEND_DIRECTORY,), inference_objectives="chat=1,bulk=3") as running:
        yield running


@pytest.fixture
async def client(async_protocol: type[AsyncClient], gated: RunningServer) -> AsyncIterator[AsyncClient]:
    async with async_protocol(gated) as connected:
        yield connected


Open = Callable[[str], GatedModel]


@pytest.fixture
def model(gated: RunningServer, client: AsyncClient) -> Open:
    return lambda name: GatedModel(gated, client, name)


async def test_requests_that_wait_share_a_batch(model: Open) -> None:
    async with model("plain") as plain:
        await plain.block()
        for request_id in "abc":
            await plain.send(request_id)
        await plain.finish()
        assert plain.gate.batches == [("blocker",), ("a", "b", "c")]


async def test_without_dynamic_batching_nobody_shares(model: Open) -> None:
    async with model("unbatched") as unbatched:
        await unbatched.block()
        for request_id in "ab":
            await unbatched.send(request_id)
        await unbatched.finish()
        assert unbatched.gate.batches == [("blocker",), ("a",), ("b",)]


async def test_batches_are_what_the_statistics_say(model: Open, gated: RunningServer) -> None:
    async with model("plain") as plain:
        before = await _counts(plain)
        await plain.block()
        for request_id, rows in (("a", 2), ("b", 1)):
            await plain.send(request_id, rows=rows)
        await plain.finish()
        await until(lambda: plain.inflight == 0, "all were answered")
        assert await _counts(plain) - before == Counter(inferences=4, executions=2, success=3, rows1=1, rows3=1)


async def _counts(model: GatedModel) -> Counter[str]:
    """Cumulative numbers of the statistics extension, over this client's protocol."""
    statistics = await model.client.raw.get_inference_statistics(model.name)
    if not isinstance(statistics, dict):
        from google.protobuf import json_format

        statistics = json_format.MessageToDict(statistics, preserving_proto_field_name=True)
    (row,) = statistics["model_stats"]
    counts = Counter(
        inferences=int(row.get("inference_count", 0)),
        executions=int(row.get("execution_count", 0)),
        success=int(row["inference_stats"]["success"].get("count", 0)),
    )
    for batch in row.get("batch_stats", []):
        counts[f"rows{batch['batch_size']}"] = int(batch["compute_infer"]["count"])
    return counts


async def test_a_batch_never_holds_more_rows_than_the_model_takes(model: Open) -> None:
    async with model("plain") as plain:
        await plain.block()
        for number in range(10):
            await plain.send(f"{number}")
        await plain.finish()
        assert [len(batch) for batch in plain.gate.batches] == [1, 4, 4, 2]
        assert [request_id for batch in plain.gate.batches[1:] for request_id in batch] == list("0123456789")


async def test_what_does_not_fit_lets_later_ones_overtake(model: Open) -> None:
    async with model("plain") as plain:
        await plain.block()
        for request_id, rows in (("three", 3), ("two", 2), ("one", 1)):
            await plain.send(request_id, rows=rows)
        await plain.finish()
        assert plain.gate.batches == [("blocker",), ("three", "one"), ("two",)]


async def test_what_does_not_fit_closes_the_batch_where_order_is_kept(model: Open) -> None:
    async with model("ordered") as ordered:
        await ordered.block()
        for request_id, rows in (("three", 3), ("two", 2), ("one", 1)):
            await ordered.send(request_id, rows=rows)
        await ordered.finish()
        assert ordered.gate.batches == [("blocker",), ("three",), ("two", "one")]


async def test_shapes_are_batched_apart(model: Open) -> None:
    async with model("plain") as plain:
        await plain.block()
        for request_id, width in (("a", 1), ("b", 2), ("c", 1), ("d", 2)):
            await plain.send(request_id, width=width)
        await plain.finish()
        assert plain.gate.batches == [("blocker",), ("a", "c"), ("b", "d")]


async def test_requests_with_other_optional_inputs_are_batched_apart(model: Open) -> None:
    async with model("optional") as optional:
        await optional.block()
        for request_id, others in (("a", ()), ("b", ("INPUT1",)), ("c", ()), ("d", ("INPUT1",))):
            await optional.send(request_id, others=others)
        await optional.finish()
        assert optional.gate.batches == [("blocker",), ("a", "c"), ("b", "d")]


@pytest.mark.parametrize(("name", "first"), [("pair", "second"), ("ordered_pair", "first")])
async def test_answers_come_in_order_only_where_order_is_kept(layout: str, model: Open, name: str, first: str) -> None:
    answered: list[str] = []
    async with model(name) as pair:
        for request_id in ("first", "second"):
            task = await pair.block(request_id)
            task.add_done_callback(lambda _, request_id=request_id: answered.append(request_id))
        pair.gate.let("second")
        if first == "second":
            await until(lambda: bool(answered), "the second was answered before the first")
        else:
            await asyncio.sleep(0.05)
            assert not answered
        await pair.finish()
        # Connections of different processes have no order between them on the way back.
        assert layout == "native-processes" or answered[0] == first


async def test_a_preferred_size_goes_at_once(model: Open) -> None:
    async with model("preferred") as preferred:
        preferred.gate.release()
        first = await preferred.send("a")
        await asyncio.sleep(0.05)
        assert not first.done(), "one row is no preferred size, and the queue delay is a minute"
        await preferred.send("b")
        await preferred.finish()
        assert preferred.gate.batches == [("a", "b")]


async def test_the_largest_preferred_size_that_waits_is_taken(model: Open) -> None:
    async with model("preferred") as preferred:
        await preferred.block(rows=2)
        for number in range(5):
            await preferred.send(f"{number}")
        preferred.gate.release()
        await until(lambda: preferred.queue_depth == 1, "four of five went")
        await preferred.send("last")
        await preferred.finish()
        assert preferred.gate.batches == [("blocker",), ("0", "1", "2", "3"), ("4", "last")]


async def test_a_lone_request_waits_out_the_queue_delay(model: Open) -> None:
    async with model("delayed") as delayed:
        delayed.gate.release()
        started = time.monotonic()
        await delayed.send("alone")
        await delayed.finish()
        assert time.monotonic() - started >= 0.19


async def test_requests_within_the_queue_delay_share_a_batch(model: Open) -> None:
    async with model("patient") as patient:
        patient.gate.release()
        for request_id in "abc":
            patient.start(request_id)
        await patient.finish()
        assert [sorted(batch) for batch in patient.gate.batches] == [["a", "b", "c"]]


async def test_urgent_requests_go_first(model: Open) -> None:
    async with model("levels") as levels:
        await levels.block()
        for request_id, priority in (("low", 3), ("unsaid", 0), ("beyond", 9), ("high", 1), ("high too", 1)):
            await levels.send(request_id, priority=priority)
        await levels.finish()
        order = [request_id for batch in levels.gate.batches for request_id in batch]
        assert order == ["blocker", "high", "high too", "unsaid", "beyond", "low"]


async def test_objectives_of_an_endpoint_picker_are_priorities(model: Open) -> None:
    async with model("levels") as levels:
        await levels.block()
        for request_id, objective, priority in (("bulk", "bulk", 0), ("own", "bulk", 2), ("chat", "chat", 0)):
            await levels.send(request_id, priority=priority, headers={OBJECTIVE_HEADER: objective})
        await levels.finish()
        assert levels.gate.batches == [("blocker",), ("chat",), ("own",), ("bulk",)]


async def test_a_full_queue_refuses_at_once(model: Open) -> None:
    async with model("full") as full:
        await full.block()
        for request_id in ("first", "second"):
            await full.send(request_id)
        with pytest.raises(ClientError, match="Exceeds maximum queue size") as refused:
            await full.start("third")
        assert refused.value.code is ErrorCode.UNAVAILABLE
        full.gate.release()
        await until(lambda: full.inflight == 0, "there was room again")
        await full.send("fourth")
        await until(lambda: full.inflight == 0, "the fourth was answered")
        assert full.gate.batches == [("blocker",), ("first",), ("second",), ("fourth",)]


async def test_a_full_level_leaves_the_others_room(model: Open) -> None:
    async with model("full_level") as model_of_levels:
        await model_of_levels.block()
        await model_of_levels.send("urgent", priority=1)
        for number in range(3):
            await model_of_levels.send(f"{number}", priority=2)
        with pytest.raises(ClientError, match="at priority level 1"):
            await model_of_levels.start("urgent too", priority=1)


async def test_who_waits_too_long_is_refused_while_the_instance_is_busy(model: Open) -> None:
    async with model("impatient") as impatient:
        blocker = await impatient.block()
        with pytest.raises(ClientError, match="Request timeout expired") as refused:
            await impatient.start("late")
        assert refused.value.code is ErrorCode.UNAVAILABLE
        assert not blocker.done()
        impatient.gate.release()
        await blocker
        assert impatient.gate.batches == [("blocker",)]


async def test_a_request_may_bring_its_own_patience(model: Open) -> None:
    async with model("override") as override:
        await override.block()
        patient = await override.send("patient")
        with pytest.raises(ClientError, match="Request timeout expired"):
            await override.start("impatient", timeout=50_000)
        assert not patient.done()
        override.gate.release()
        await patient


async def test_its_patience_is_ignored_where_the_config_does_not_allow_it(model: Open) -> None:
    async with model("plain") as plain:
        await plain.block()
        await plain.send("a", timeout=1)
        await asyncio.sleep(0.02)
        await plain.finish()
        assert plain.gate.batches == [("blocker",), ("a",)]


async def test_late_requests_may_be_delayed_and_not_dropped(model: Open) -> None:
    async with model("late") as late:
        await late.block()
        await late.send("old", timeout=1000)
        await asyncio.sleep(0.01)
        await late.send("young")
        await late.finish()
        assert late.gate.batches == [("blocker",), ("young",), ("old",)]
