"""Reasoning and answer, however the text is cut."""

from __future__ import annotations

import pytest

from modelserver.frontends.llm.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningReader

TAGS = {name: tags for name, tags in REASONING_FORMATS.items() if not tags.has_channels}


def read(tags: ReasoningFormat, text: str, size: int, *, is_inside: bool | None = None) -> tuple[str, str]:
    reader = ReasoningReader(tags, is_inside=tags.is_implicit if is_inside is None else is_inside)
    deltas = [reader.push(text[at : at + size]) for at in range(0, len(text), size)]
    deltas.append(reader.finish())
    return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas)


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("tags", TAGS.values(), ids=TAGS)
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


@pytest.mark.parametrize(
    ("text", "is_inside", "count"),
    [
        ("<think> I am so </think> yes", False, 3),
        (" <think> </think> yes", False, 0),
        ("<think> it never ends", False, 3),
        ("I am </think> yes", True, 2),
        ("it never ends", True, 3),
        ("yes I am", False, 0),
        # As other tokens than the tags alone are.
        ("<think>I am </think> yes", False, None),
        ("<think> I am</think> yes", False, None),
    ],
)
def test_tokens_are_counted_between_those_of_the_tags(text: str, is_inside: bool, count: int | None) -> None:
    """A token is a word here."""
    reader = ReasoningReader(REASONING_FORMATS["qwen3"], is_inside=is_inside)
    reader.push(text)
    reader.finish()
    words = text.split()
    numbers = {word: number for number, word in enumerate(["<think>", "</think>", *words])}
    ids = [numbers[word] for word in words]
    assert reader.count(ids, [numbers["<think>"]], [numbers["</think>"]]) == count
