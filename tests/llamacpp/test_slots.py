"""What runs, as llama.cpp's server tells it: slots and metrics of an engine, and of models of other backends."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from support.layouts import ADDRESS, free_port
from support.llm_models import write_llm
from support.mock_llm import say
from support.serving import running_server
from support.tiny_checkpoints import write_checkpoint
from support.waiting import until_true

ENDLESS = {"prompt": [5, 6, 7], "stream": True, "ignore_eos": True, "seed": 7, "min_p": 0.25, "n_predict": 90_000}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A language model with two slots, at llama.cpp's own port."""
    root, port = tmp_path_factory.mktemp("slots"), free_port()
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), values={"max_position_embeddings": 100_000})
    write_llm(root, "tiny", checkpoint, dtype="float32", max_num_seqs="2")
    with (
        running_server(root, exit_on_error=True, api=(f"llamacpp={port}",)),
        httpx.Client(base_url=f"http://{ADDRESS}:{port}", timeout=20) as http,
    ):
        yield http


def metrics(http: httpx.Client) -> dict[str, float]:
    page = http.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line.split() for line in page.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_slots_tell_what_the_engine_computes(engine: httpx.Client) -> None:
    idle = engine.get("/slots").json()
    assert [(slot["id"], slot["is_processing"]) for slot in idle] == [(0, False), (1, False)]
    assert engine.get("/props").json()["total_slots"] == 2
    with engine.stream("POST", "/completion", json=ENDLESS) as first:
        first_lines = first.iter_lines()
        next(first_lines)
        with engine.stream("POST", "/completion", json=ENDLESS) as second:
            second_lines = second.iter_lines()
            next(second_lines)
            slots = engine.get("/slots").json()
            assert engine.get("/slots", params={"fail_on_no_slot": "1"}).status_code == 503
            running = metrics(engine)
    assert [slot["is_processing"] for slot in slots] == [True, True]
    (slot, _) = slots
    assert (slot["n_prompt_tokens"], slot["n_ctx"]) == (3, idle[0]["n_ctx"])
    assert (
        slot["params"].items()
        >= {"seed": 7, "min_p": 0.25, "ignore_eos": True, "stream": True, "n_predict": 90_000}.items()
    )
    token = slot["next_token"]
    assert (token["n_decoded"] > 0, token["n_decoded"] + token["n_remain"]) == (True, 90_000)
    assert running["llamacpp:requests_processing"] == 2
    until_true(lambda: metrics(engine)["llamacpp:requests_processing"] == 0, "clients that left end their sequences")
    assert engine.get("/slots", params={"fail_on_no_slot": "1"}).json() == idle


def test_metrics_count_what_the_engine_has_done(engine: httpx.Client) -> None:
    before = metrics(engine)
    engine.post("/completion", json={**ENDLESS, "prompt": [9, 8, 7, 6], "n_predict": 5, "stream": False})
    after = metrics(engine)
    grown = {name.removeprefix("llamacpp:"): value - before[name] for name, value in after.items()}
    assert (grown["prompt_tokens_total"], grown["tokens_predicted_total"], grown["n_decode_total"]) == (4, 5, 5)
    assert grown["prompt_seconds_total"] > 0
    assert grown["tokens_predicted_seconds_total"] > 0
    assert after["llamacpp:n_tokens_max"] >= 9
    assert 1 <= after["llamacpp:n_busy_slots_per_decode"] <= 2


def test_a_model_of_another_backend_tells_its_requests(http: httpx.Client) -> None:
    (slot,) = http.get("/slots").json()
    assert (slot["n_ctx"], slot["is_processing"], slot["params"]) == (512, False, {})
    with http.stream("POST", "/completion", json={"prompt": say(text="one two", hang=1), "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert [slot["is_processing"] for slot in http.get("/slots").json()] == [True]
        assert metrics(http) == {"llamacpp:requests_processing": 1, "llamacpp:requests_deferred": 0}


def test_no_property_can_be_changed(http: httpx.Client) -> None:
    assert http.post("/props", json={}).json() == {"success": True}
    refused = http.post("/props", json={"n_ctx": 5})
    assert (refused.status_code, "'n_ctx' cannot be changed" in refused.text) == (400, True)
