"""Claims, progress and publication, where several workers share a job and some of them die."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.cloud import memory_bucket

from modelserver.batch.job import Claim, Counts, Input, Job, Manifest, Owner, Record, Shard
from modelserver.batch.places import LocalPlace, Place, open_place
from modelserver.errors import InvalidArgumentError

SCOPE = range(3)


@pytest.fixture(params=["disk", "object store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "disk":
        yield LocalPlace(tmp_path / "out")
    else:
        with memory_bucket("batches") as bucket:
            yield open_place(f"memory://{bucket.name}/out")


class Worker:
    """A worker with a clock of its own."""

    def __init__(self, place: Place, name: str, *, starts_over: bool = False, answer: str = "") -> None:
        self.now_s = 0.0
        manifest = Manifest([Input("in", 1, "t")], {"answer": answer}, {}, [Shard(0, 0, 9, 2)] * 3).seal()
        self.job = Job.open(
            place,
            lambda: manifest,
            manifest.digest,
            starts_over=starts_over,
            owner=Owner(name),
            suffix=".jsonl",
            now_s=lambda: self.now_s,
        )

    def claim(self) -> Claim:
        claim = self.job.claim(SCOPE)
        assert claim is not None
        return claim


def test_each_shard_has_one_worker(place: Place) -> None:
    workers = [Worker(place, "a"), Worker(place, "b")]
    assert sorted(workers[number % 2].claim().shard for number in SCOPE) == [0, 1, 2]
    assert all(worker.job.claim(SCOPE) is None and not worker.job.is_done(SCOPE) for worker in workers)


def test_a_lost_workers_shard_is_taken_after_the_lease_and_its_rows_are_not_asked_again(place: Place) -> None:
    lost, other = Worker(place, "a"), Worker(place, "b")
    claim = lost.claim()
    value = np.array([[1.5, np.nan]], "f4")
    lost.job.keep(claim, [Record(1, {"y": value, "b": b"\xff"})])
    lost.job.keep(claim, [Record(0, "why", "400", 2)])
    others = [other.claim(), other.claim()]
    assert other.job.claim(SCOPE) is None
    other.now_s += 50
    lost.job.renew(claim)
    assert other.job.claim(SCOPE) is None
    other.now_s += 50
    assert other.job.claim(SCOPE) is None  # it was renewed 50 seconds ago, by this worker's clock
    other.now_s += 11
    taken = other.claim()
    assert (taken.shard, taken.number) == (claim.shard, claim.number + 1)
    records = other.job.recover(taken)
    np.testing.assert_array_equal(records[1].value["y"], value)
    assert records[1].value["b"] == b"\xff"
    assert records[0] == Record(0, "why", "400", 2)
    assert not lost.job.renew(claim)
    assert all(other.job.renew(each) for each in (*others, taken))


def test_of_two_workers_of_a_shard_one_publishes(place: Place) -> None:
    """The first one was only slow, and its files are not mixed with the second one's."""
    slow, other = Worker(place, "a"), Worker(place, "b")
    claim = slow.claim()
    for shard in (1, 2):
        each = slow.claim()
        assert each.shard == shard
        slow.job.publish(each, b"", b"", Counts())
    assert other.job.claim(SCOPE) is None
    other.now_s += 61
    taken = other.claim()
    assert other.job.publish(taken, b"two\n", b"", Counts(1, 0))
    assert not slow.job.publish(claim, b"one\n", b"error\n", Counts(0, 1))
    assert place.read("part-00000.jsonl") == b"two\n"
    assert other.job.finish()
    assert other.job.manifest.counts == Counts(1, 0)
    assert sorted(place.names()) == [
        "_manifest.json",
        *(f"_state/0000{number}/done" for number in SCOPE),
        *(f"part-0000{number}.jsonl" for number in SCOPE),
    ]


def test_a_worker_of_the_same_name_goes_on_at_once(place: Place) -> None:
    """A pod of an Indexed Job comes back under its index."""
    before = Worker(place, "shard 0 of 1")
    claim = before.claim()
    again = Worker(place, "shard 0 of 1")
    shards = {again.claim().shard for _ in SCOPE}
    assert claim.shard in shards
    assert not before.job.renew(claim)


def test_a_kill_between_the_decision_and_the_move_is_completed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(place, "a")
    claims = [worker.claim() for _ in SCOPE]
    with monkeypatch.context() as patch:
        patch.setattr(type(place), "move", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            worker.job.publish(claims[0], b"row\n", b"bad\n", Counts(1, 1))
    for claim in claims[1:]:
        worker.job.publish(claim, b"row\n", b"", Counts(2, 0))
    again = Worker(place, "b")
    assert again.job.claim(SCOPE) is None
    assert again.job.is_done(SCOPE)
    assert again.job.finish()
    assert place.read("part-00000.jsonl") == b"row\n"
    assert place.read("errors/part-00000.jsonl") == b"bad\n"
    assert again.job.manifest.counts == Counts(5, 1)


def test_another_job_is_refused_unless_forced(place: Place) -> None:
    first = Worker(place, "a")
    first.job.publish(first.claim(), b"row\n", b"", Counts(2, 0))
    with pytest.raises(InvalidArgumentError, match="other inputs, options or another version"):
        Worker(place, "a", answer="other")
    forced = Worker(place, "a", answer="other", starts_over=True)
    assert list(place.names()) == ["_manifest.json"]
    assert forced.claim().shard == 0
    place.remove("_manifest.json")
    place.write("part-00000.jsonl", b"somebody's")
    with pytest.raises(InvalidArgumentError, match="has parts, but no _manifest"):
        Worker(place, "a")
