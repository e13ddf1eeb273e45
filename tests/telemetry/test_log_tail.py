"""The newest lines of the log: kept, and passed on to who follows."""

from __future__ import annotations

import asyncio
import threading

from modelserver.telemetry.log_tail import NUM_KEPT, LogTail


def test_only_the_newest_lines_are_kept() -> None:
    tail = LogTail()
    for number in range(NUM_KEPT + 5):
        tail.add(str(number))
    assert tail.newest(2) == [str(NUM_KEPT + 3), str(NUM_KEPT + 4)]
    assert tail.newest(0) == []
    assert len(tail.newest(10 * NUM_KEPT)) == NUM_KEPT


async def test_a_follower_gets_the_last_lines_and_then_each_new_one() -> None:
    tail = LogTail()
    for number in range(5):
        tail.add(str(number))
    follower = tail.follow(2)
    assert await follower.lines() == ["3", "4"]
    thread = threading.Thread(target=lambda: [tail.add(f"new {number}") for number in range(100)])
    thread.start()
    seen: list[str] = []
    while len(seen) < 100:
        seen += await asyncio.wait_for(follower.lines(), 60)
    thread.join()
    assert seen == [f"new {number}" for number in range(100)]
    follower.close()
    tail.add("unheard")
    tail.close()
    assert tail.newest(1) == ["unheard"]


async def test_a_slow_follower_is_told_how_much_it_missed_and_ends_with_the_server() -> None:
    tail = LogTail()
    follower = tail.follow(0)
    for number in range(NUM_KEPT + 7):
        follower.take(str(number))
    lines = await follower.lines()
    assert len(lines) == NUM_KEPT + 1
    assert "7 lines" in lines[-1]
    tail.close()
    assert await follower.lines() == []
    assert await follower.lines() == []
    follower.close()
