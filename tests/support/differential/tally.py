"""What was compared in this run, and how it came out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from support.differential.facts import Comparison
from support.differential.verdicts import Rule, rule_for


@dataclass
class Tally:
    """Counts of a run. Facts of cases that are not all meant are not counted."""

    num_cases: int = 0
    num_equal_cases: int = 0
    num_deadly_cases: int = 0
    num_facts: int = 0
    differences: Counter[Rule] = field(default_factory=Counter)

    def judge(self, case: str, comparison: Comparison) -> list[str]:
        """The differences that are not meant; counts the others."""
        rules = {path: rule_for(case, path, pair) for path, pair in comparison.differences.items()}
        unmeant = [
            f"{path}: Triton {comparison.differences[path][0]!r}, ours {comparison.differences[path][1]!r}"
            for path, rule in rules.items()
            if rule is None
        ]
        if not unmeant:
            self.num_cases += 1
            self.num_equal_cases += not rules
            self.num_facts += comparison.num_facts
            self.differences.update(rule for rule in rules.values() if rule is not None)
        return unmeant

    def text(self) -> str:
        """The counts, and each rule that was used with the number of its differences."""
        better = sum(count for rule, count in self.differences.items() if rule.is_better)
        different = self.differences.total() - better
        equal = self.num_facts - better - different
        lines = [
            f"{self.num_cases} cases, {self.num_equal_cases} of them without any difference; "
            f"{self.num_deadly_cases} more are deadly for Triton and were only asked of ours",
            f"{self.num_facts} facts: {equal} equal, {better} deliberately better, {different} different",
        ]
        for rule, count in sorted(self.differences.items(), key=lambda item: (not item[0].is_better, -item[1])):
            lines.append(f"  {'better' if rule.is_better else 'different'} {count:5d}  {rule.reason}")
        return "\n".join(lines)


TALLY = Tally()
