"""Tries on a GPU what nothing else can try: `PYTHONPATH=tests:. python -m gpu [--json FILE] [--budget S]
[--previous FILE] [--plan] [--rehearse] [WORD ...]`, and writes reports as a table: `python -m gpu --markdown FILE ...`.

Steps run in another process, because what is tried may end it. Those of a file share one, as its start takes longer
than most of them; after one that fails the rest have a new one. A word chooses the steps whose name has it. Where the
packages are not installed, they are taken from the tree. The file has the results so far after each step.

With a budget those steps come first that are worth most per second, by the estimates beside them (`steps.takes`);
`--plan` shows them. What has PASSed in a previous report is left out (`--previous`, more than once for several). A step
that is not expected to end in time is not begun: it is LATER, and so is one that was cut, whose facts so far are
reported. Exit code 1 if a step FAILs, 2 if none PASSes.

`--rehearse` runs the same steps on a CPU with tiny shapes, to find what would fail in them before a GPU is there. Its
report says so, and has no figures. Kernels run where Triton is installed, in its interpreter.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import importlib
import importlib.util
import json
import math
import os
import platform
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from gpu.steps import IS_REHEARSAL, REHEARSAL, Absent, tell_with
from gpu.tree import ROOT, installed_from_tree, tomllib

HERE = Path(__file__).parent
TIMEOUT_S = 900.0
# The files of steps, those of which most is learnt first; others come after them.
_ORDER = ("device_steps", "llm_steps", "server_steps", "pytorch_steps", "onnxruntime_steps", "tensorrt_steps")
_MARK = "RESULT "
_SO_FAR_MARK = "SO FAR "
# The start of a process that imports torch and meets the GPU for the first time.
_START_S = 12.0
# Of a step that says nothing of itself: what it takes, and what it is worth.
_STEP_S, _WORTH = 15.0, 3.0
# Modules of the tree: one that is not there is a fault of the step.
_OURS = {"modelserver", "modelserver_backends", "gpu", "support", "benchmarks"}
# What steps import besides, by the names of their distributions; the first name of those that are one.
_PACKAGES = (
    ("numpy",),
    ("msgspec",),
    ("orjson",),
    ("prometheus-client",),
    ("protobuf",),
    ("grpcio",),
    ("httptools",),
    ("uvloop",),
    ("uvicorn",),
    ("psutil",),
    ("pyyaml",),
    ("typer",),
    ("rich",),
    ("pytest",),
    ("torch",),
    ("triton", "pytorch-triton"),
    ("transformers",),
    ("tokenizers",),
    ("safetensors",),
    ("jinja2",),
    ("llguidance",),
    ("flashinfer-python",),
    ("onnxruntime-gpu",),
    ("onnx",),
    ("tensorrt", "tensorrt-cu13", "tensorrt-cu13-bindings", "tensorrt-cu12", "tensorrt-cu12-bindings"),
    ("tensorrt_rtx_cu13", "tensorrt_rtx_cu13_bindings", "tensorrt_rtx_cu12", "tensorrt_rtx_cu12_bindings"),
    ("tritonclient",),
    ("nvidia-ml-py",),
)


@dataclass(frozen=True, slots=True)
class Step:
    """`<file>.<name>`, how long it is expected to take, and what it is worth beside others: see `steps.takes`."""

    name: str
    seconds: float = _STEP_S
    worth: float = _WORTH

    @property
    def file(self) -> str:
        return self.name.partition(".")[0]


def known_steps() -> list[Step]:
    """Every step, without importing the files."""
    paths = sorted(
        HERE.glob("*_steps.py"), key=lambda path: (path.stem not in _ORDER, [*_ORDER, path.stem].index(path.stem))
    )
    return [
        Step(f"{path.stem}.{node.name}", *_estimate(node))
        for path in paths
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("step_")
    ]


def _estimate(function: ast.FunctionDef) -> tuple[float, float]:
    for call in function.decorator_list:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "takes":
            named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
            return ast.literal_eval(call.args[0]), named.get("worth", _WORTH)
    return _STEP_S, _WORTH


def step_names() -> list[str]:
    return [step.name for step in known_steps()]


def left_after(steps: Sequence[Step], previous: Sequence[Path]) -> list[Step]:
    """Without those that PASSed in a previous report."""
    results = [result for report in previous for result in json.loads(report.read_text())["results"]]
    done = {result["step"] for result in results if result["verdict"] == "PASS"}
    return [step for step in steps if step.name not in done]


def ordered(steps: Sequence[Step], budget_s: float) -> tuple[list[Step], list[Step]]:
    """Those that are expected to fit into a budget, and the others: those come first that are worth most per second.

    Steps of a file stand together, as a process that has imported the libraries does not begin anew then.
    """
    if math.isinf(budget_s):
        return list(steps), []
    left_s = budget_s
    chosen: list[Step] = []
    for step in sorted(steps, key=lambda step: -step.worth / step.seconds):
        cost_s = step.seconds + (0.0 if any(other.file == step.file for other in chosen) else _START_S)
        if cost_s <= left_s:
            chosen.append(step)
            left_s -= cost_s
    rates = {
        file: sum(step.worth for step in own) / (_START_S + sum(step.seconds for step in own))
        for file in {step.file for step in chosen}
        for own in [[step for step in chosen if step.file == file]]
    }
    chosen.sort(key=lambda step: -rates[step.file])  # and by what a second of each is worth within one
    others = [step for step in steps if step not in chosen]
    return chosen, sorted(others, key=lambda step: -step.worth / step.seconds)


class Child:
    """A process that runs steps, one after the other, until one fails."""

    def __init__(self, names: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `end`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gpu", "--steps", *names], stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        # What the step in progress has told so far.
        self.so_far: Any = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def result(self, timeout_s: float) -> dict[str, Any] | None:
        """Verdict and facts, or the reason, of the next step. TimeoutError; None if the process has ended."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None
        if line is not None:
            self.so_far = None
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
                elif line.startswith(_SO_FAR_MARK):
                    self.so_far = json.loads(line.removeprefix(_SO_FAR_MARK))
        self._lines.put(None)


def run_steps(steps: Sequence[Step], ends_s: float) -> Iterator[dict[str, Any]]:
    """What steps give, in order: name, verdict, seconds and facts, or the reason. One that is not expected to end
    before the budget does is not begun.
    """
    child: Child | None = None
    try:
        for index, step in enumerate(steps):
            began_s = time.monotonic()
            left_s = ends_s - began_s
            timeout_s = min(TIMEOUT_S, left_s)
            if left_s < step.seconds + (_START_S if child is None else 0.0):
                reason = f"it takes about {step.seconds:.0f} s, and {max(0.0, left_s):.0f} s are left"
                yield {"step": step.name, "verdict": "LATER", "seconds": 0.0, "reason": reason}
                if child is not None:  # it would begin the step
                    child.end()
                    child = None
                continue
            child = child or Child([each.name for each in steps[index:]])
            try:
                result = child.result(timeout_s) or {"verdict": "FAIL", "reason": child.last_words()}
            except TimeoutError:
                is_cut = timeout_s < TIMEOUT_S  # by the budget, which says nothing about the step
                reason = "the budget was spent before it ended" if is_cut else "it took too long"
                result = {"verdict": "LATER" if is_cut else "FAIL", "reason": reason}
            if result["verdict"] in ("FAIL", "LATER"):
                if child.so_far is not None and REHEARSAL not in os.environ:
                    result["facts"] = child.so_far
                child.end()
                child = None
            yield {"step": step.name, "seconds": round(time.monotonic() - began_s, 2), **result}
    finally:
        if child is not None:
            child.end()


def run_here(name: str) -> dict[str, Any]:
    module, _, function = name.partition(".")
    tell_with(lambda facts: print(_SO_FAR_MARK + json.dumps(facts, default=str), flush=True))
    try:
        if IS_REHEARSAL:
            from support import rehearsed_cuda

            rehearsed_cuda.install()
        facts = getattr(importlib.import_module(f"gpu.{module}"), function)()
    except Absent as absent:
        return {"verdict": "ABSENT", "reason": str(absent)}
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in _OURS or not package:
            return {"verdict": "FAIL", "reason": "".join(traceback.format_exception(error))[-2000:]}
        return {"verdict": "ABSENT", "reason": f"not installed: {package}"}
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


def versions() -> dict[str, str | None]:
    """The packages that steps use, in the versions that are installed; None of one that is not."""
    found: dict[str, str | None] = {}
    for names in _PACKAGES:  # several that have the same module
        installed = [f"{name} {metadata.version(name)}" for name in names if _is_installed(name)]
        found[names[0]] = installed[0].partition(" ")[2] if installed else None
    return found


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def unexpected(found: Mapping[str, str | None]) -> dict[str, str]:
    """What pyproject.toml, and torch for Triton, want of packages that are installed in other versions."""
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        try:
            from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]
        except ModuleNotFoundError:
            return {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(chain(project["dependencies"], *project["optional-dependencies"].values()))
    if found.get("torch") is not None:
        lines += [line for line in metadata.requires("torch") or () if line.startswith("triton")]
    wanted: dict[str, str] = {}
    for requirement in map(Requirement, lines):
        name = requirement.name if requirement.name != "onnxruntime" else "onnxruntime-gpu"
        version = found.get(name)
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            wanted[name] = str(requirement.specifier)
    return wanted


def missing_parts() -> list[str]:
    """The parts in C that are not built for this Python. They are no tracked files."""
    sources = [*(ROOT / "modelserver").rglob("_*.c"), *(ROOT / "backends").rglob("_*.c")]
    return [
        str(path.relative_to(ROOT).with_suffix(""))
        for path in sorted(sources)
        if not any(path.with_suffix(suffix).is_file() for suffix in EXTENSION_SUFFIXES[:-1])
    ]


@functools.cache
def machine() -> dict[str, Any]:
    """What figures depend on. Nothing here makes a context of CUDA, which steps would find in the GPU's memory."""
    facts: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "commit": _commit()}
    if REHEARSAL in os.environ:
        facts["rehearsal"] = "on a CPU, with tiny shapes"
    cpu = re.search(r"model name\s*: (.*)", _text_of(Path("/proc/cpuinfo")))
    facts["cpu"] = f"{cpu[1] if cpu else platform.machine()}, {os.cpu_count()} processors"
    facts["gpu"] = _said_by(
        "nvidia-smi", "--query-gpu=name,memory.total,compute_cap,driver_version", "--format=csv,noheader"
    )
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin:
        cuda = re.search(r"^cuda\b.*'(.*)'", _text_of(Path(torch.origin).with_name("version.py")), re.MULTILINE)
        facts["cuda of torch"] = cuda[1] if cuda else None
    facts["python"] = platform.python_version()
    facts["packages"] = {name: version for name, version in versions().items() if version is not None}
    facts["other versions than expected"] = unexpected(versions())
    facts["parts in C that are not built"] = missing_parts()
    return facts


def _commit() -> str | None:
    """Of a checkout, or of what `git archive` made of one."""
    archived = (HERE / "commit.txt").read_text().strip()
    return _said_by("git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty") or (
        None if archived.startswith("$") else archived
    )


def _said_by(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _text_of(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def say_what_is_missing() -> None:
    """Before any step: what to carry here, so that a short loan of a machine is not spent to find it out."""
    found = versions()
    missing = [name for name, version in found.items() if version is None]
    if missing:
        print(
            f"Not installed here: {', '.join(missing)}. Steps that need one of them are ABSENT. "
            "tests/gpu/wheelhouse.py carries packages in parts, and says how they are installed."
        )
    for name, wanted in unexpected(found).items():
        print(f"{name} is {found[name]}, and {wanted} is expected: a step that FAILs may do so for that.")
    if parts := missing_parts():
        print(
            f"Parts in C that are not built: {', '.join(parts)}. Figures of the server are those of pure Python. "
            "With a compiler and setuptools 77 or later: "
            f"{sys.executable} setup.py build_ext --inplace. Files *.abi3.so from another machine do as well."
        )


def markdown(reports: Sequence[Path]) -> str:
    """The machine of each report, and a table of its steps."""
    lines: list[str] = []
    for report in reports:
        document = json.loads(report.read_text())
        lines += [f"- {name}: {_words(value)}" for name, value in document["machine"].items()]
        lines += ["", "| step | verdict | seconds | found |", "|---|---|--:|---|"]
        for result in document["results"]:
            facts, reason = result.get("facts"), result.get("reason", "")
            found = "; ".join(filter(None, (_words(facts) if facts else "", reason)))
            cell = found.replace("|", "\\|").replace("\n", "<br>")
            lines.append(f"| {result['step']} | {result['verdict']} | {result['seconds']} | {cell} |")
        lines.append("")
    return "\n".join(lines)


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_words(each)}" for name, each in value.items()) or "none"
    return "; ".join(map(_words, value)) if isinstance(value, list) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gpu")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds for all steps")
    parser.add_argument(
        "--previous", type=Path, action="append", default=[], help="a report: steps that PASSed in it are left out"
    )
    parser.add_argument("--markdown", type=Path, nargs="+", help="write reports as tables, and run no step")
    parser.add_argument("--plan", action="store_true", help="show which steps would run in which order, and run none")
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
    steps = [
        step for step in known_steps() if not arguments.words or any(word in step.name for word in arguments.words)
    ]
    if arguments.markdown:
        print(markdown(arguments.markdown))
        return
    steps = left_after(steps, arguments.previous)
    if arguments.plan:
        show_plan(*ordered(steps, arguments.budget))
        return
    if arguments.rehearse:
        # The compiled products are put aside for the kernels.
        os.environ |= {REHEARSAL: "1", "TRITON_INTERPRET": "1", "MODELSERVER_PURE_PYTHON": "1"}
        print("A rehearsal on a CPU: it shows that steps run to their end, and no figures.")
    say_what_is_missing()
    with ExitStack() as held:
        if importlib.util.find_spec("modelserver_backends") is None:
            held.enter_context(installed_from_tree())
        results = run_all(steps, budget_s=arguments.budget, report=arguments.json)
    counts = Counter(result["verdict"] for result in results)
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in ("PASS", "FAIL", "ABSENT", "LATER")))
    print(_words(machine()))
    sys.exit(1 if counts["FAIL"] else 0 if counts["PASS"] else 2)


def show_plan(chosen: Sequence[Step], others: Sequence[Step]) -> None:
    clock_s, file = 0.0, ""
    for step in chosen:
        clock_s += 0.0 if step.file == file else _START_S
        print(f"{clock_s:5.0f} s  {step.name}  about {step.seconds:.0f} s, worth {step.worth:g}")
        clock_s, file = clock_s + step.seconds, step.file
    print(f"{clock_s:5.0f} s  the end")
    for step in others:
        print(f"        {step.name}  about {step.seconds:.0f} s, worth {step.worth:g}: only if time is left")


def run_all(steps: Sequence[Step], *, budget_s: float, report: Path | None) -> list[dict[str, Any]]:
    """The results of all steps, printed one by one; `report` has those so far after each."""
    results: list[dict[str, Any]] = []
    ends_s = time.monotonic() + budget_s
    chosen, others = ordered(steps, budget_s)
    for result in chain.from_iterable(
        run_steps(list(group), ends_s)
        for part in (chosen, others)
        for _, group in groupby(part, lambda step: step.file)
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
