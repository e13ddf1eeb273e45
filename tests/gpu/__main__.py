"""Tries on a GPU what nothing else can try: `PYTHONPATH=tests:. python -m gpu [--json FILE] [--budget S] [WORD ...]`.

Every step runs in a process of its own, because what is tried may end it. A word chooses the steps whose name has it.
The steps of which most is learnt come first, and the file has the results so far after each of them. When the budget is
spent, the steps that are left are LATER. Exit code 1 if a step FAILs.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import math
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu.steps import Absent

HERE = Path(__file__).parent
TIMEOUT_S = 900.0
# The files of steps, those of which most is learnt first; others come after them.
_ORDER = ("device_steps", "llm_steps", "pytorch_steps", "onnxruntime_steps", "tensorrt_steps")
# Less than this is not worth the start of a process that imports torch.
_LEAST_S = 15.0
_MARK = "RESULT "


def step_names() -> list[str]:
    """`<file>.<name>` of every step, without importing the files."""
    paths = sorted(
        HERE.glob("*_steps.py"), key=lambda path: (path.stem not in _ORDER, [*_ORDER, path.stem].index(path.stem))
    )
    return [
        f"{path.stem}.{node.name}"
        for path in paths
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("step_")
    ]


def run_step(name: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """What a step gives, in a process of its own: verdict, seconds and facts, or the reason."""
    began_s = time.monotonic()
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "gpu", "--step", name],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        is_cut = timeout_s < TIMEOUT_S  # by the budget, which says nothing about the step
        reason = "the budget was spent before it ended" if is_cut else "it took too long"
        return {"step": name, "verdict": "LATER" if is_cut else "FAIL", "seconds": timeout_s, "reason": reason}
    seconds = round(time.monotonic() - began_s, 2)
    lines = [line for line in ended.stdout.splitlines() if line.startswith(_MARK)]
    if not lines:
        last = (ended.stderr or ended.stdout).strip().splitlines()[-12:]
        reason = f"the process ended with {ended.returncode}: " + "\n".join(last)
        return {"step": name, "verdict": "FAIL", "seconds": seconds, "reason": reason}
    return {"step": name, "seconds": seconds, **json.loads(lines[-1].removeprefix(_MARK))}


def run_here(name: str) -> dict[str, Any]:
    module, _, function = name.partition(".")
    try:
        facts = getattr(importlib.import_module(f"gpu.{module}"), function)()
    except Absent as absent:
        return {"verdict": "ABSENT", "reason": str(absent)}
    return {"verdict": "PASS", "facts": facts}


def machine() -> dict[str, Any]:
    facts: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version()}
    try:
        import torch

        facts["torch"] = torch.__version__
        if torch.cuda.is_available():
            facts["gpu"] = torch.cuda.get_device_name(0)
            facts["compute_capability"] = ".".join(map(str, torch.cuda.get_device_capability(0)))
    except ImportError:
        pass
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gpu")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds for all steps")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        print(_MARK + json.dumps(run_here(arguments.step), default=str))
        return
    names = [name for name in step_names() if not arguments.words or any(word in name for word in arguments.words)]
    results = run_all(names, budget_s=arguments.budget, report=arguments.json)
    counts = Counter(result["verdict"] for result in results)
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in ("PASS", "FAIL", "ABSENT", "LATER")), machine())
    sys.exit(1 if counts["FAIL"] else 0)


def run_all(names: Sequence[str], *, budget_s: float, report: Path | None) -> list[dict[str, Any]]:
    """The results of all steps, printed one by one; `report` has those so far after each."""
    results: list[dict[str, Any]] = []
    ends_s = time.monotonic() + budget_s
    for name in names:
        left_s = ends_s - time.monotonic()
        if left_s < _LEAST_S:
            result = {"step": name, "verdict": "LATER", "seconds": 0.0, "reason": "the budget is spent"}
        else:
            result = run_step(name, min(TIMEOUT_S, left_s))
        results.append(result)
        facts = result.get("reason", result.get("facts", ""))
        print(f"{result['verdict']:6} {name} {result['seconds']:.1f} s  {facts}", flush=True)
        if report is not None:
            document = {"machine": machine(), "results": results}
            report.write_text(json.dumps(document, indent=1, default=str) + "\n")
    return results


if __name__ == "__main__":
    main()
