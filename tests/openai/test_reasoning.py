"""Reasoning and answer, however the text is cut."""

from __future__ import annotations

import pytest

from modelserver.frontends.openai.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningReader


def read(tags: ReasoningFormat, text: str, size: int, *, is_inside: bool | None = None) -> tuple[str, str]:
    reader = ReasoningReader(tags, is_inside=tags.is_implicit if is_inside is None else is_inside)
    deltas = [reader.push(text[at : at + size]) for at in range(0, len(text), size)]
    deltas.append(reader.finish())
    return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas)


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("tags", REASONING_FORMATS.values(), ids=REASONING_FORMATS)
def test_every_format(tags: ReasoningFormat, size: int) -> None:
    start, end = tags.start, tags.end
    assert read(tags, f"{start}\nI  think <b> so.\n{end}\n\nYes.\n", size) == ("I  think <b> so.", "Yes.\n")
    assert read(tags, f"{start}\n\n{end}\n\nYes.", size) == ("", "Yes.")
    assert read(tags, f"{start} never ends", size) == ("never ends", "")
    assert read(tags, f"{start} a {end[:3]} b{end}c{end}d", size) == (f"a {end[:3]} b", f"c{end}d")
    assert read(tags, "Yes.", size, is_inside=False) == ("", "Yes.")
    assert read(tags, f" {start[:2]}", size, is_inside=False) == ("", f" {start[:2]}")


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_the_first_tag_may_be_the_template_s(size: int) -> None:
    tags = REASONING_FORMATS["deepseek_r1"]
    assert read(tags, "I think.\n</think>\nYes.", size) == ("I think.", "Yes.")
    assert read(tags, "I think", size) == ("I think", "")
    assert read(tags, "Yes.", size, is_inside=False) == ("", "Yes.")
