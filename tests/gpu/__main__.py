"""Tries on a GPU what nothing else can try: `PYTHONPATH=tests:. python -m gpu [--json FILE] [--budget S] [--rehearse]
[WORD ...]`.

Steps run in another process, because what is tried may end it. Those of a file share one, as its start takes longer
than most of them; after one that fails the rest have a new one. A word chooses the steps whose name has it. Where the
packages are not installed, they are taken from the tree. The steps of which most is learnt come first, and the file has
the results so far after each of them. When the budget is spent, the steps that are left are LATER. Exit code 1 if a
step FAILs.

`--rehearse` runs the same steps on a CPU with tiny shapes, to find what would fail in them before a GPU is there. Its
report says so, and has no figures. Kernels run where Triton is installed, in its interpreter.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import importlib.util
import json
import math
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from gpu.steps import IS_REHEARSAL, REHEARSAL, Absent
from gpu.tree import installed_from_tree

HERE = Path(__file__).parent
TIMEOUT_S = 900.0
# The files of steps, those of which most is learnt first; others come after them.
_ORDER = ("device_steps", "llm_steps", "server_steps", "pytorch_steps", "onnxruntime_steps", "tensorrt_steps")
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


class Child:
    """A process that runs steps, one after the other, until one fails."""

    def __init__(self, names: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `end`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gpu", "--steps", *names], stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def result(self, timeout_s: float) -> dict[str, Any] | None:
        """Verdict and facts, or the reason, of the next step. TimeoutError; None if the process has ended."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None
        found: dict[str, Any] | None = None if line is None else json.loads(line)
        return found

    def last_words(self) -> str:
        """Of a process that has ended."""
        code = self._process.wait()
        self._errors.seek(0)
        return f"the process ended with {code}: " + "\n".join(self._errors.read().strip().splitlines()[-12:])

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._errors.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                if line.startswith(_MARK):
                    self._lines.put(line.removeprefix(_MARK))
        self._lines.put(None)


def run_steps(names: Sequence[str], ends_s: float) -> Iterator[dict[str, Any]]:
    """What steps give, in order: name, verdict, seconds and facts, or the reason."""
    child: Child | None = None
    try:
        for index, name in enumerate(names):
            began_s = time.monotonic()
            timeout_s = min(TIMEOUT_S, ends_s - began_s)
            if timeout_s < _LEAST_S:
                yield {"step": name, "verdict": "LATER", "seconds": 0.0, "reason": "the budget is spent"}
                continue
            child = child or Child(names[index:])
            try:
                result = child.result(timeout_s) or {"verdict": "FAIL", "reason": child.last_words()}
            except TimeoutError:
                is_cut = timeout_s < TIMEOUT_S  # by the budget, which says nothing about the step
                reason = "the budget was spent before it ended" if is_cut else "it took too long"
                result = {"verdict": "LATER" if is_cut else "FAIL", "reason": reason}
            if result["verdict"] in ("FAIL", "LATER"):
                child.end()
                child = None
            yield {"step": name, "seconds": round(time.monotonic() - began_s, 2), **result}
    finally:
        if child is not None:
            child.end()


def run_here(name: str) -> dict[str, Any]:
    module, _, function = name.partition(".")
    if IS_REHEARSAL:
        from support import rehearsed_cuda

        rehearsed_cuda.install()
    try:
        facts = getattr(importlib.import_module(f"gpu.{module}"), function)()
    except Absent as absent:
        return {"verdict": "ABSENT", "reason": str(absent)}
    except Exception as error:  # whatever fails is the step's result
        last = "".join(traceback.format_exception(error)).strip().splitlines()[-24:]
        return {"verdict": "FAIL", "reason": "\n".join(last)}
    return {"verdict": "PASS", "facts": {} if IS_REHEARSAL else facts}


def give_memory_back() -> None:
    """What the next step is not to find in use."""
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def machine() -> dict[str, Any]:
    facts: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version()}
    if REHEARSAL in os.environ:
        facts["rehearsal"] = "on a CPU, with tiny shapes"
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
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny shapes")
    parser.add_argument("--steps", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for name in arguments.steps or ():
        result = run_here(name)
        print(_MARK + json.dumps(result, default=str), flush=True)
        if result["verdict"] == "FAIL":  # a device may be of no use to this process after it
            return
        give_memory_back()
    if arguments.steps:
        return
    names = [name for name in step_names() if not arguments.words or any(word in name for word in arguments.words)]
    if arguments.rehearse:
        # The compiled products are put aside for the kernels.
        os.environ |= {REHEARSAL: "1", "TRITON_INTERPRET": "1", "MODELSERVER_PURE_PYTHON": "1"}
        print("A rehearsal on a CPU: it shows that steps run to their end, and no figures.")
    with ExitStack() as held:
        if importlib.util.find_spec("modelserver_backends") is None:
            held.enter_context(installed_from_tree())
        results = run_all(names, budget_s=arguments.budget, report=arguments.json)
    counts = Counter(result["verdict"] for result in results)
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in ("PASS", "FAIL", "ABSENT", "LATER")), machine())
    sys.exit(1 if counts["FAIL"] else 0)


def run_all(names: Sequence[str], *, budget_s: float, report: Path | None) -> list[dict[str, Any]]:
    """The results of all steps, printed one by one; `report` has those so far after each."""
    results: list[dict[str, Any]] = []
    ends_s = time.monotonic() + budget_s
    for result in chain.from_iterable(
        run_steps(list(group), ends_s) for _, group in groupby(names, lambda name: name.partition(".")[0])
    ):
        results.append(result)
        facts = result.get("reason", result.get("facts", ""))
        print(f"{result['verdict']:6} {result['step']} {result['seconds']:.1f} s  {facts}", flush=True)
        if report is not None:
            document = {"machine": machine(), "results": results}
            report.write_text(json.dumps(document, indent=1, default=str) + "\n")
    return results


if __name__ == "__main__":
    main()
