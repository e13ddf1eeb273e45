"""The steps that need a GPU, on a machine without one: they import what exists, and end before CUDA."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu import __main__ as driver
from gpu import wheelhouse
from gpu.__main__ import HERE, run_here, step_names
from gpu.tree import write_installation
from support.recorded_graphs import RecordedGraphs, recorded_graphs


@pytest.mark.parametrize("path", sorted(HERE.glob("*.py")), ids=lambda path: path.stem)
def test_what_the_steps_import_exists(path: Path) -> None:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and importlib.util.find_spec(node.module.partition(".")[0]):
            try:
                module = importlib.import_module(node.module)
            except ModuleNotFoundError as error:
                if error.name != "triton":  # only machines with a GPU have it
                    raise
                continue
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
                found.append(alias.name)
    assert found


@pytest.mark.tool("no-gpu")
@pytest.mark.parametrize("name", step_names())
def test_without_a_gpu_every_step_is_absent(name: str) -> None:
    outcome = run_here(name)
    assert outcome["verdict"] == "ABSENT", outcome
    assert outcome["reason"]


def rehearse(report: Path, *words: str) -> dict[str, dict[str, str]]:
    """Verdicts and reasons by step. Raises if a step fails."""
    subprocess.run(
        [sys.executable, "-m", "gpu", "--rehearse", "--json", str(report), *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE.parents[1]), *sys.path])},
        check=True,
        timeout=500,
    )
    document = json.loads(report.read_text())
    assert document["machine"]["rehearsal"]
    assert not any(result.get("facts") for result in document["results"]), "a rehearsal has no figures"
    return {result["step"]: result for result in document["results"]}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_steps_run_to_their_end_in_a_rehearsal(tmp_path: Path) -> None:
    """Those of kernels do so where Triton is installed. The cases of kernels are tests of their own."""
    files = ("llm_steps", "server_steps", "pytorch_steps")
    words = [name for name in step_names() if name.startswith(files) and "twins" not in name]
    found = rehearse(tmp_path / "report.json", *words)
    for name, result in found.items():
        lacks_triton = result.get("reason") == "not installed: triton"
        assert result["verdict"] == "PASS" or (lacks_triton and importlib.util.find_spec("triton") is None), name


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", ["device_steps", "onnxruntime_steps", "tensorrt_steps"])
def test_steps_on_fakes_of_the_libraries_run_to_their_end(tmp_path: Path, file: str) -> None:
    found = rehearse(tmp_path / "report.json", file)
    assert {name.partition(".")[0] for name in found} == {file}
    assert {result["verdict"] for result in found.values()} == {"PASS"}


@pytest.mark.parametrize(
    "compute",
    [
        lambda values: values * values[0].item(),
        lambda values: values + sum(values.tolist()),
        lambda values: values[values > 1],
        lambda values: values + torch.tensor([1.0, 2.0]),
        lambda values: values.copy_(torch.from_numpy(np.ones(2, np.float32))),
        lambda values: values if bool(values.sum() > 0) else -values,
        lambda values: values + torch.cuda.synchronize(),
    ],
    ids=["item", "tolist", "nonzero", "a list", "pageable memory", "a condition", "synchronize"],
)
def test_a_capture_of_a_rehearsal_fails_where_that_of_a_gpu_does(
    compute: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    values = torch.ones(2)
    refused = pytest.raises(RuntimeError, match="not permitted when stream is capturing")
    with recorded_graphs() as device, RecordedGraphs(device).recording(), refused:
        compute(values)


def test_what_a_rehearsal_captures_is_computed_when_it_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []
    values, count = torch.full((2,), 3.0), torch.zeros(1)

    def compute() -> torch.Tensor:
        if not kept:
            kept.append(values * 2)
        count.add_(1)
        return kept[0] + 1

    with recorded_graphs() as device:
        graphs = RecordedGraphs(device)
        with graphs.recording():
            output = compute()
            replay = graphs.end()
        # What a capture has kept for later is not there before it is replayed.
        assert (output.isnan().all(), kept[0].isnan().all(), count.item()) == (True, True, 0)
        replay()
    assert (output.tolist(), kept[0].tolist(), count.item()) == ([7, 7], [6, 6], 1)


def test_packages_of_the_tree_need_no_installation(tmp_path: Path) -> None:
    write_installation(tmp_path)
    code = (
        "import importlib.metadata, importlib.util; "
        "print(importlib.util.find_spec('modelserver_backends.llm').origin); "
        "print(importlib.metadata.version('modelserver-py'))"
    )
    ended = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    origin, version = ended.stdout.split()
    assert Path(origin).samefile(HERE.parents[1] / "backends" / "llm" / "__init__.py")
    assert version == importlib.metadata.version("modelserver-py")


def test_a_wheelhouse_is_carried_in_parts(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    written = {f"{name}.whl": os.urandom(size) for name, size in (("one", 3000), ("two", 50_000), ("empty", 0))}
    for name, content in written.items():
        (tmp_path / "wheels" / name).write_bytes(content)
    parts = wheelhouse.split(tmp_path / "wheels", tmp_path / "parts", part_bytes=7000)
    assert len(parts) > 7
    assert max(part.stat().st_size for part in parts) <= 7000
    joined = wheelhouse.join(tmp_path / "parts", tmp_path / "joined")
    assert {path.name: path.read_bytes() for path in joined} == written
    parts[2].write_bytes(parts[2].read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"part\.002 is not as it was written"):
        wheelhouse.join(tmp_path / "parts", tmp_path / "joined")
    parts[2].unlink()
    with pytest.raises(ValueError, match=r"part\.002 is missing"):
        wheelhouse.join(tmp_path / "parts", tmp_path / "joined")


# Steps as a file of `tests/gpu` has them.
TRIED = """
import os
from gpu.steps import Absent
def step_a(): return {"process": os.getpid()}
def step_b(): raise Absent("it is not here")
def step_c(): return {"process": os.getpid()}
def step_d(): assert False, "a wrong number"
def step_e(): os._exit(7)
def step_f(): return {"process": os.getpid()}
"""


def test_steps_share_a_process_until_one_fails_and_the_report_has_each_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "tried_steps.py").write_text(TRIED)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(HERE.parent), str(HERE.parents[1])]))
    report = tmp_path / "report.json"
    names = [f"tried_steps.step_{letter}" for letter in "abcdef"]
    results = driver.run_all([driver.Step(name) for name in names], budget_s=100, report=report)
    assert [result["step"] for result in results] == names
    assert [result["verdict"] for result in results] == ["PASS", "ABSENT", "PASS", "FAIL", "FAIL", "PASS"]
    assert results[0]["facts"] == results[2]["facts"] != results[5]["facts"]
    assert "a wrong number" in results[3]["reason"]
    assert "ended with 7" in results[4]["reason"]
    assert json.loads(report.read_text())["results"] == results
    (later,) = driver.run_all([driver.Step(names[0], 30)], budget_s=20, report=report)
    assert later["verdict"] == "LATER"
    assert re.fullmatch("it takes about 30 s, and 20 s are left", later["reason"])


def test_a_step_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "slow_steps.py").write_text(
        "import time\nfrom gpu.steps import so_far\n"
        "def step_a(): so_far({'half': 1}); time.sleep(60)\ndef step_b(): return {}\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(HERE.parent), str(HERE.parents[1])]))
    monkeypatch.setattr(driver, "TIMEOUT_S", 0.5)
    steps = [driver.Step("slow_steps.step_a"), driver.Step("slow_steps.step_b")]
    slow, after = driver.run_all(steps, budget_s=100, report=None)
    assert (slow["verdict"], slow["reason"]) == ("FAIL", "it took too long")
    assert after["verdict"] in ("PASS", "FAIL")


def test_a_step_that_the_budget_cuts_reports_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "slow_steps.py").write_text(
        "import time\nfrom gpu.steps import so_far\ndef step_a():\n so_far({'half': 1})\n time.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(HERE.parent), str(HERE.parents[1])]))
    monkeypatch.setattr(driver, "_START_S", 1.0)
    (cut,) = driver.run_all([driver.Step("slow_steps.step_a", 1.0)], budget_s=4, report=None)
    assert (cut["verdict"], cut["facts"]) == ("LATER", {"half": 1})
    assert cut["reason"] == "the budget was spent before it ended"


def test_a_budget_goes_to_what_is_worth_most_per_second(tmp_path: Path) -> None:
    steps = [
        driver.Step("a_steps.step_long", 100, 5),
        driver.Step("a_steps.step_short", 5, 1),
        driver.Step("b_steps.step_best", 10, 30),
        driver.Step("c_steps.step_too_long", 60, 50),
    ]
    chosen, others = driver.ordered(steps, 60)
    assert [step.name for step in chosen] == ["b_steps.step_best", "a_steps.step_short"]
    assert [step.name for step in others] == ["c_steps.step_too_long", "a_steps.step_long"]
    assert driver.ordered(steps, math.inf) == (steps, [])
    report = tmp_path / "report.json"
    results = [
        {"step": "b_steps.step_best", "verdict": "PASS", "seconds": 9.0, "facts": {"speed": "3 tokens/s"}},
        {"step": "c_steps.step_too_long", "verdict": "FAIL", "seconds": 20.0, "reason": "a | b\nno"},
    ]
    report.write_text(json.dumps({"machine": {"gpu": "H100", "packages": {"torch": "2.13.0"}}, "results": results}))
    left = driver.left_after(steps, [report])
    assert [step.name for step in left] == ["a_steps.step_long", "a_steps.step_short", "c_steps.step_too_long"]
    written = driver.markdown([report])
    assert "- gpu: H100\n- packages: torch: 2.13.0\n" in written
    assert "| b_steps.step_best | PASS | 9.0 | speed: 3 tokens/s |\n" in written
    assert "| c_steps.step_too_long | FAIL | 20.0 | a \\| b<br>no |\n" in written


def test_540_seconds_have_the_most_telling_steps_of_every_backend_and_another_call_has_the_rest() -> None:
    steps = driver.known_steps()
    chosen, others = driver.ordered(steps, 540)
    took_s = sum(step.seconds for step in chosen) + driver._START_S * len({step.file for step in chosen})
    assert 480 < took_s <= 540
    names = {step.name for step in chosen}
    for name in (
        "device_steps.step_memory_of_another_process_is_used_in_place",
        "llm_steps.step_text_is_the_same_with_graphs_without_and_on_sdpa",
        "llm_steps.step_the_engine_on_the_shapes_of_llama_8b",
        "llm_steps.step_the_engine_on_the_shapes_of_qwen3",
        "onnxruntime_steps.step_cuda_answers_as_the_cpu",
        "pytorch_steps.step_an_exported_program_answers_as_on_the_cpu",
        "server_steps.step_256_chats_are_streamed",
        "tensorrt_steps.step_rtx_parity_fp32",
        "tensorrt_steps.step_tensorrt_parity_fp32",
    ):
        assert name in names
    _, later = driver.ordered(others, 540)
    assert len(later) < len(others) / 2


def test_versions_that_are_not_expected_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"onnxruntime-gpu": "1.19.2", "torch": "2.13.0", "uvloop": "0.22.1", "tokenizers": None}
    monkeypatch.setattr(driver, "versions", lambda: found)
    assert driver.unexpected(found) == {"onnxruntime-gpu": ">=1.20"}
    driver.say_what_is_missing()
    assert "onnxruntime-gpu is 1.19.2, and >=1.20 is expected" in capsys.readouterr().out
    assert {"commit", "cpu", "gpu", "packages", "python"} <= driver.machine().keys()


def test_what_is_not_installed_is_named_and_no_fault_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gpu").mkdir()
    for name, module in (("foreign", "a_library_of_others"), ("own", "modelserver.no_such_module")):
        (tmp_path / "gpu" / f"{name}_steps.py").write_text(f"import {module}\ndef step_a(): return {{}}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(HERE.parent), str(HERE.parents[1])]))
    steps = [driver.Step(f"{name}_steps.step_a") for name in ("foreign", "own")]
    foreign, own = driver.run_all(steps, budget_s=100, report=None)
    assert (foreign["verdict"], foreign["reason"]) == ("ABSENT", "not installed: a_library_of_others")
    assert own["verdict"] == "FAIL"
    assert "modelserver.no_such_module" in own["reason"]
    monkeypatch.setattr(driver, "_PACKAGES", (("numpy",), ("a-library-of-others", "its-other-name")))
    driver.say_what_is_missing()
    assert "Not installed here: a-library-of-others. Steps that need one" in capsys.readouterr().out


@pytest.mark.tool("no-gpu")
def test_a_run_in_which_nothing_passes_does_not_succeed() -> None:
    """A Python without any package, as a machine may have it."""
    ended = subprocess.run(
        [sys.executable, "-S", "-m", "gpu", "blocks_are_aligned"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE.parents[1])])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert "Not installed here: numpy, msgspec" in ended.stdout
