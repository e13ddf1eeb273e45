"""Tries on a GPU what nothing else can try: `PYTHONPATH=tests:. python -m gpu [--json FILE] [WORD ...]`.

Every step runs in a process of its own, because what is tried may end it. A word chooses the steps whose name has it.
Exit code 1 if a step FAILs.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu.steps import Absent

HERE = Path(__file__).parent
TIMEOUT_S = 900.0
_MARK = "RESULT "


def step_names() -> list[str]:
    """`<file>.<name>` of every step, without importing the files."""
    return [
        f"{path.stem}.{node.name}"
        for path in sorted(HERE.glob("*_steps.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("step_")
    ]


def run_step(name: str) -> dict[str, Any]:
    """What a step gives, in a process of its own: verdict, seconds and facts, or the reason."""
    began_s = time.monotonic()
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "gpu", "--step", name],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"step": name, "verdict": "FAIL", "seconds": TIMEOUT_S, "reason": "it took too long"}
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
    parser.add_argument("--step", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        print(_MARK + json.dumps(run_here(arguments.step), default=str))
        return
    names = [name for name in step_names() if not arguments.words or any(word in name for word in arguments.words)]
    results = []
    for name in names:
        result = run_step(name)
        results.append(result)
        print(
            f"{result['verdict']:6} {name} {result['seconds']:.1f} s  {result.get('reason', result.get('facts', ''))}"
        )
    report = {"machine": machine(), "results": results}
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1, default=str) + "\n")
    counts = {
        verdict: sum(result["verdict"] == verdict for result in results) for verdict in ("PASS", "FAIL", "ABSENT")
    }
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()), report["machine"])
    sys.exit(1 if counts["FAIL"] else 0)


if __name__ == "__main__":
    main()
