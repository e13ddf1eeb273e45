"""The whole text of the errors for bad configs, from bad_configs.txt: a config, then its problems."""

import re
from pathlib import Path

import pytest

from modelserver.config.defaults import normalise
from modelserver.config.pbtxt import parse_pbtxt, read_pbtxt
from modelserver.config.problem import Problem, error_of
from modelserver.config.validate import validate
from modelserver.errors import ConfigError

CASES = re.split(r"^=== ", Path(__file__).with_name("bad_configs.txt").read_text(), flags=re.MULTILINE)[1:]


def problems_of(text: str, *, is_normalised: bool = False) -> tuple[Problem, ...]:
    try:
        parsed = parse_pbtxt(text)
    except ConfigError as error:
        return error.problems
    config = normalise(parsed.config, model_name="x") if is_normalised else parsed.config
    return validate(config, locations=parsed.locations)


@pytest.mark.parametrize("case", CASES, ids=[case.partition("\n")[0] for case in CASES])
def test_problems(case: str) -> None:
    text, expected = case.partition("\n")[2].split("--- problems\n")
    assert "".join(f"{problem}\n" for problem in problems_of(text)) == expected
    assert expected


@pytest.mark.parametrize("case", CASES, ids=[case.partition("\n")[0] for case in CASES])
def test_normalising_hides_no_problem_but_missing_names(case: str) -> None:
    text = case.partition("\n")[2].split("--- problems\n")[0]
    before, after = problems_of(text), problems_of(text, is_normalised=True)
    filled_in = [problem for problem in before if problem.field == "name" and problem.message.endswith("got none")]
    assert [problem.field for problem in before if problem not in filled_in] == [problem.field for problem in after]


@pytest.mark.parametrize("case", CASES, ids=[case.partition("\n")[0] for case in CASES])
def test_reading_past_mistakes_reports_the_same_ones(case: str) -> None:
    text = case.partition("\n")[2].split("--- problems\n")[0]
    assert mistakes_read_past(text) in ((), problems_of(text))


def mistakes_read_past(text: str) -> tuple[Problem, ...]:
    try:
        problems = read_pbtxt(text).problems
    except ConfigError as error:
        return error.problems
    return error_of(problems, "").problems if problems else ()
