"""Turns of connections that are sent much."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from modelserver.wire.context import MAX_TURNS_AT_ONCE, BulkTurns


async def test_a_few_go_on_in_each_turn_of_the_loop_in_their_order() -> None:
    bulk = BulkTurns(asyncio.get_running_loop())
    passed: list[int] = []

    async def go(number: int) -> None:
        await bulk.wait()
        passed.append(number)

    tasks = [asyncio.ensure_future(go(number)) for number in range(3 * MAX_TURNS_AT_ONCE)]
    counts = [0]
    while len(passed) < len(tasks) - 1:
        await asyncio.sleep(0)
        if len(passed) > counts[-1]:
            counts.append(len(passed))
        if len(counts) == 2:
            tasks[-1].cancel()  # who left takes nobody's turn
    await asyncio.gather(*tasks, return_exceptions=True)
    assert passed == list(range(3 * MAX_TURNS_AT_ONCE - 1))
    assert max(after - before for before, after in pairwise(counts)) == MAX_TURNS_AT_ONCE
    await asyncio.wait_for(bulk.wait(), 60)
