"""The progress bar is for terminals only."""

from __future__ import annotations

import asyncio
import io

from modelserver.bench.report_text import WIDTH, ProgressBar, bar_text, count_text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


async def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    out = Terminal()
    bar = ProgressBar(out)
    bar.level_began("concurrency 4")
    bar.window_began(2, 5.0)
    await asyncio.sleep(0.01)
    bar.close()
    assert "concurrency 4, window 2" in out.getvalue()
    assert out.getvalue().endswith("\r\x1b[K")


async def test_a_file_gets_nothing() -> None:
    out = io.StringIO()
    bar = ProgressBar(out)
    bar.level_began("x")
    bar.window_began(1, 5.0)
    bar.count("x", 1, 2)
    await asyncio.sleep(0)
    bar.close()
    assert out.getvalue() == ""


def test_the_bar_fills() -> None:
    assert bar_text("x", 1, 0.0, 5.0).count("━") == 0
    assert bar_text("x", 1, 2.5, 5.0).count("━") == WIDTH // 2
    assert bar_text("x", 1, 9.0, 5.0).endswith("100%")
    assert bar_text("x", 1, 9.0, 0.0) == "  x, 9 s"
    assert "3 of 4" in count_text("x", 3, 4)
