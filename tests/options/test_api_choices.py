from __future__ import annotations

import pytest

from modelserver.errors import InvalidArgumentError
from modelserver.options.flags import ApiChoice, parse_api_choices


def test_each_api_is_on_off_or_on_a_port() -> None:
    assert parse_api_choices(["a=off", "OpenAI = on", "c=9000"]) == {
        "a": ApiChoice(is_served=False),
        "openai": ApiChoice(),
        "c": ApiChoice(port=9000),
    }


@pytest.mark.parametrize("text", ["a", "=on", "a=", "a=maybe", "a=70000", "a=-1", "a=1_000"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^--api"):
        parse_api_choices([text])


def test_one_choice_each() -> None:
    with pytest.raises(InvalidArgumentError, match="'a' is given twice"):
        parse_api_choices(["a=on", "a=off"])
