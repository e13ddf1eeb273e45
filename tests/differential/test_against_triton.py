"""The same requests to the real Triton and to ours: the answers are the same, or differ as `verdicts` says."""

from __future__ import annotations

import pytest
from support.differential import (
    control_cases,
    document_cases,
    flag_cases,
    grpc_cases,
    http_cases,
    inference_cases,
    mode_cases,
)
from support.differential.facts import Case, compare
from support.differential.servers import LAUNCHER
from support.differential.tally import TALLY
from support.differential.target import Target
from support.differential.verdicts import RULES

pytestmark = [pytest.mark.tool(LAUNCHER), pytest.mark.slow, pytest.mark.timeout(600)]

CASES = [
    case for table in (document_cases, inference_cases, http_cases, grpc_cases, control_cases) for case in table.CASES
]
MODES = {"none": mode_cases.NONE_CASES, "poll": mode_cases.POLL_CASES, "space": mode_cases.SPACE_CASES}
MODE_CASES = [(mode, case) for mode, cases in MODES.items() for case in cases]
ALL = [*CASES, *control_cases.CONTROL_CASES, *flag_cases.FLAG_CASES, *(case for _, case in MODE_CASES)]


def _named(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", [case for case in CASES if not case.deadly], ids=_named)
def test_the_same_answer(pair: tuple[Target, Target], case: Case) -> None:
    theirs, ours = (case.ask(target) for target in pair)
    unmeant = TALLY.judge(case.name, compare(theirs, ours))
    assert not unmeant, "\n".join(unmeant)


@pytest.mark.parametrize("case", [case for case in control_cases.CONTROL_CASES if not case.deadly], ids=_named)
def test_the_same_control(control_pair: tuple[Target, Target], case: Case) -> None:
    theirs, ours = (case.ask(target) for target in control_pair)
    unmeant = TALLY.judge(case.name, compare(theirs, ours))
    assert not unmeant, "\n".join(unmeant)


@pytest.mark.parametrize("case", flag_cases.FLAG_CASES, ids=_named)
def test_the_same_with_flags(flag_pair: tuple[Target, Target], case: Case) -> None:
    theirs, ours = (case.ask(target) for target in flag_pair)
    unmeant = TALLY.judge(case.name, compare(theirs, ours))
    assert not unmeant, "\n".join(unmeant)


@pytest.mark.parametrize(("mode", "case"), MODE_CASES, ids=[case.name for _, case in MODE_CASES])
def test_the_same_in_each_mode(request: pytest.FixtureRequest, mode: str, case: Case) -> None:
    theirs, ours = (case.ask(target) for target in request.getfixturevalue(f"{mode}_pair"))
    unmeant = TALLY.judge(case.name, compare(theirs, ours))
    assert not unmeant, "\n".join(unmeant)


@pytest.mark.parametrize("case", [case for case in ALL if case.deadly], ids=_named)
def test_what_triton_cannot_be_asked(pair: tuple[Target, Target], case: Case) -> None:
    """Ours answers, and goes on."""
    assert case.ask(pair[1])
    assert pair[1].http("GET", "/v2/health/live").status == 200
    TALLY.num_deadly_cases += 1


def test_every_rule_is_needed(request: pytest.FixtureRequest) -> None:
    """Differences that have gone take their rules with them. Only a run of all cases can tell."""
    if TALLY.num_cases == sum(not case.deadly for case in ALL):
        idle = [rule.reason for rule in RULES if rule not in TALLY.differences]
        assert not idle, idle


def test_names_are_unique() -> None:
    names = [case.name for case in ALL]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})
