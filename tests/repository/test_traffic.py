"""Versions that share a model's requests by weight, and what is no traffic."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.repositories import identity_request, open_repository, write_model

from modelserver.core.request import InFlightRequest
from modelserver.errors import InvalidArgumentError, NotFoundError
from modelserver.repository.traffic import Split, Traffic, parse_traffic
from modelserver.repository.traffic_control import TrafficStore


def ask(**fields: Any) -> InFlightRequest:
    return InFlightRequest(model_name="m", version=None, inputs={}, **fields)


def chosen(split: Split, number: int, ready: tuple[int, ...] = (1, 2, 3)) -> Counter[int | None]:
    return Counter(split.choose(ask(), ready) for _ in range(number))


def test_weights_are_exact_and_even() -> None:
    split = Split("m", Traffic({1: 90, 2: 10}))
    assert chosen(split, 1000) == {1: 900, 2: 100}
    runs = [split.choose(ask(), (1, 2)) for _ in range(100)]
    assert all(Counter(runs[start : start + 10])[2] == 1 for start in range(0, 100, 10)), "one in every ten"


def test_versions_that_are_not_ready_give_their_part_to_others() -> None:
    split = Split("m", Traffic({1: 1, 2: 1, 3: 2}))
    assert chosen(split, 80, (1, 2)) == {1: 40, 2: 40}
    assert chosen(split, 10, (4,)) == {None: 10}
    assert chosen(split, 80) == {1: 20, 2: 20, 3: 40}


def test_a_weight_of_zero_answers_nobody() -> None:
    assert chosen(Split("m", Traffic({1: 1, 2: 0})), 10) == {1: 10}


@pytest.mark.parametrize("sticky_by", ["caller", "parameter:user"])
def test_who_is_kept_together_stays_with_a_version(sticky_by: str) -> None:
    split = Split("m", Traffic({1: 75, 2: 25}, sticky_by))

    def of(user: int, ready: tuple[int, ...] = (1, 2)) -> int | None:
        request = ask(caller=f"user {user}", parameters={"user": user})
        return split.choose(request, ready)

    first = {user: of(user) for user in range(2000)}
    assert first == {user: of(user) for user in range(2000)}
    assert Counter(first.values())[2] == pytest.approx(500, abs=90)
    moved = Split("m", Traffic({1: 70, 2: 30}, sticky_by))
    split = moved
    assert sum(of(user) != version for user, version in first.items()) < 250, "few move when weights do"


def test_sequences_stay_together() -> None:
    split = Split("m", Traffic({1: 1, 2: 1}))
    for sequence in range(1, 50):
        assert len({split.choose(ask(sequence_id=sequence), (1, 2)) for _ in range(5)}) == 1


def test_shadows_see_their_part() -> None:
    split = Split("m", Traffic({}, "", {2: 0.25, 3: 1.0, 4: 0.0}))
    seen = Counter(version for _ in range(100) for version in split.shadows((1, 2, 3), 1))
    assert seen == {2: 25, 3: 100}
    assert split.shadows((1, 3), 3) == [], "nobody is the shadow of himself"


def test_a_document_is_what_it_was_made_from() -> None:
    document = {"weights": {"1": 90, "2": 10}, "sticky_by": "caller", "shadows": {"3": 0.5}, "tolerance": 0.01}
    assert parse_traffic(document).document == document


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "give 'weights' or 'shadows'"),
        ({"weight": {"1": 1}}, "unknown field"),
        ({"weights": [1]}, "must be an object"),
        ({"weights": {"one": 1}}, "version numbers as keys"),
        ({"weights": {"-1": 1}}, "version numbers as keys"),
        ({"weights": {"1": -1}}, "from 0 to"),
        ({"weights": {"1": True}}, "from 0 to"),
        ({"weights": {"1": float("nan")}}, "from 0 to"),
        ({"weights": {"1": 0, "2": 0}}, "all weights are 0"),
        ({"weights": {str(n): 1 for n in range(50)}}, "up to 32"),
        ({"shadows": {"1": 1.5}}, "from 0 to 1"),
        ({"weights": {"1": 1}, "sticky_by": "cookie"}, "sticky_by"),
        ({"weights": {"1": 1}, "sticky_by": "parameter:"}, "sticky_by"),
        ({"weights": {"1": 1}, "sticky_by": 4}, "sticky_by"),
        ({"weights": {"1": 1}, "tolerance": -1}, "tolerance"),
    ],
)
def test_what_is_no_traffic(document: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        parse_traffic(document)


async def test_traffic_that_is_kept_is_there_after_a_restart(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "m", versions=(1, 2))
    options = {"override_directory": tmp_path / "kept", "load_models": ("m",)}
    traffic, other = Traffic({1: 1.0, 2: 3.0}), Traffic({1: 1.0})
    async with open_repository(tmp_path / "models", **options) as repository:
        await repository.set_traffic("m", traffic, persists=True)
    async with open_repository(tmp_path / "models", **options) as repository:
        assert repository.traffic.get("m") == traffic
        await repository.set_traffic("m", other)  # until the next start
    async with open_repository(tmp_path / "models", **options) as repository:
        assert repository.traffic.get("m") == traffic
        await repository.set_traffic("m", None)
    async with open_repository(tmp_path / "models", **options) as repository:
        assert repository.traffic.get("m") is None
        with pytest.raises(NotFoundError, match="model 'none' is not in the repository"):
            await repository.set_traffic("none", traffic)


async def test_traffic_is_kept_only_where_there_is_a_place(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    async with open_repository(tmp_path, load_models=("m",)) as repository:
        with pytest.raises(InvalidArgumentError, match="--override-directory"):
            await repository.set_traffic("m", Traffic({1: 1}), persists=True)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"m": 1}', '{"m": {"weights": {"x": 1}}}'])
def test_a_damaged_file_is_no_traffic(tmp_path: Path, content: str) -> None:
    (tmp_path / "traffic.json").write_text(content)
    assert TrafficStore(tmp_path).read() == {}


async def test_versions_that_there_are_not_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "m", versions=(1, 2))
    async with open_repository(tmp_path, load_models=("m",)) as repository:
        for traffic in (Traffic({2: 1, 7: 0}), Traffic({2: 1}, shadows={7: 1.0, 9: 0.5})):
            with pytest.raises(InvalidArgumentError, match=r"has no version 7(, 9)?; there are: 1, 2"):
                await repository.set_traffic("m", traffic)
        assert repository.traffic.get("m") is None
        write_model(tmp_path, "m", versions=(3,))
        await repository.set_traffic("m", Traffic({2: 1, 3: 1}))  # which is there, and may be loaded
        assert repository.traffic.shares("m") == {2: 1.0}
        await repository.load("m", version=3)
        assert repository.traffic.shares("m") == {2: 0.5, 3: 0.5}


async def test_what_a_version_leaves_goes_to_the_others_and_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, "m", versions=(1, 2, 3), extra="version_policy { all { } }")

    async def answering(number: int) -> Counter[int]:
        found: Counter[int] = Counter()
        for _ in range(number):
            request = identity_request("m")
            version = repository.traffic.choose(request, repository.ready_versions("m"))
            response = await repository.get("m", version).submit(request).only()
            assert response.error is None
            found[repository.get("m", version).version] += 1
        return found

    caplog.set_level("INFO", "modelserver.repository.traffic")
    async with open_repository(tmp_path, load_models=("m",)) as repository:
        await repository.set_traffic("m", Traffic({1: 3, 2: 1}))
        assert await answering(8) == {1: 6, 2: 2}
        caplog.clear()
        await repository.unload("m", version=2)
        assert "versions [2] of its traffic are not ready; who answers: version 1 1" in caplog.text
        assert repository.traffic.shares("m") == {1: 1.0}
        assert await answering(4) == {1: 4}
        await repository.unload("m", version=1)
        assert "versions [1, 2] of its traffic are not ready; who answers: version 3 1" in caplog.text
        assert await answering(4) == {3: 4}
        await repository.unload("m")
        assert repository.traffic.shares("m") == {}
        await repository.load("m")
        assert "all versions of its traffic are ready; who answers: version 1 0.75, version 2 0.25" in caplog.text
        assert await answering(8) == {1: 6, 2: 2}
        caplog.clear()
        await repository.load("m")  # nothing has changed
        assert "traffic" not in caplog.text
