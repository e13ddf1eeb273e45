"""The same requests to the real Triton and to ours: the answers are the same, or differ as `verdicts` says."""

from __future__ import annotations

import pytest
from support.differential import document_cases, grpc_cases, http_cases, inference_cases
from support.differential.facts import Case, compare
from support.differential.servers import LAUNCHER
from support.differential.tally import TALLY
from support.differential.target import Target
from support.differential.verdicts import RULES

pytestmark = [pytest.mark.tool(LAUNCHER), pytest.mark.slow, pytest.mark.timeout(600)]

CASES = [*document_cases.CASES, *inference_cases.CASES, *http_cases.CASES, *grpc_cases.CASES]


def _named(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", [case for case in CASES if not case.deadly], ids=_named)
def test_the_same_answer(pair: tuple[Target, Target], case: Case) -> None:
    theirs, ours = (case.ask(target) for target in pair)
    unmeant = TALLY.judge(case.name, compare(theirs, ours))
    assert not unmeant, "\n".join(unmeant)


@pytest.mark.parametrize("case", [case for case in CASES if case.deadly], ids=_named)
def test_what_triton_cannot_be_asked(pair: tuple[Target, Target], case: Case) -> None:
    facts = case.ask(pair[1])
    assert facts.get("status", 200) < 500 or case.name.startswith("failing"), facts
    assert facts.get("code") != "UNAVAILABLE", facts
    TALLY.num_deadly_cases += 1


def test_every_rule_is_needed(request: pytest.FixtureRequest) -> None:
    """Differences that have gone take their rules with them. Only a run of all cases can tell."""
    if TALLY.num_cases == sum(not case.deadly for case in CASES):
        idle = [rule.reason for rule in RULES if rule not in TALLY.differences]
        assert not idle, idle


def test_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})
