"""Every snippet of the README runs, as it stands, against a server over the example models."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import ANY_PORTS, ServerProcess
from support.serving import RunningServer

import modelserver

ROOT = Path(__file__).resolve().parent.parent
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SNIPPETS = _FENCE.findall((ROOT / "README.md").read_text())


def _snippets(language: str) -> list[str]:
    return [code for kind, code in _SNIPPETS if kind == language]


def _run(command: list[str], code: str, server: RunningServer) -> str:
    """Run a snippet with the ports of `server` in place of the default ones; its output."""
    local = code.replace("localhost:8000", server.http_url).replace("localhost:8001", server.grpc_url)
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MODELSERVER_URL": server.http_url,
    }
    done = subprocess.run([*command, local], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{local}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_kind_of_snippet_is_run() -> None:
    assert {kind for kind, _ in _SNIPPETS} == {"sh", "python"}


@pytest.mark.parametrize(("index", "answer"), [(0, "this is a seven"), (1, "this is a 3")])
def test_the_python_examples_read_their_digits(server: RunningServer, index: int, answer: str) -> None:
    codes = _snippets("python")
    assert len(codes) == 3
    assert _run([sys.executable, "-c"], codes[index], server).strip() == answer


def test_the_function_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(_snippets("python")[2])
    made = runpy.run_path(str(tmp_path / "app.py"))
    program = modelserver.Server(ports=False)
    program.add("double", made["double"], max_batch_size=64)
    assert 'name: "double"' in made["server"].model_config("double")
    with program:
        assert program.infer("double", x=[[1, 2, 3]])["y"].tolist() == [[2, 4, 6]]


def test_the_shell_examples_answer(server: RunningServer) -> None:
    (code,) = [code for code in _snippets("sh") if "digits_pipeline" in code]
    output = _run(["bash", "-ec"], code, server)
    assert '"data":[5.0,5.0,5.0,5.0]' in output
    assert "digits_onnx" in output
    assert re.search(r"digit\s+INT64\s+\[1, 1\]\s+3", output)
    assert re.search(r"label\s+BYTES\s+\[1, 1\]\s+seven", output)
    assert re.search(r'"model_name":"digits_pipeline".*}\W*seven', output)


def test_the_language_model_talks(server: RunningServer) -> None:
    (code,) = [code for code in _snippets("sh") if "tiny_chat" in code]
    events, answer = _run(["bash", "-ec"], code, server).split("data: [DONE]")
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: ")]
    said = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert said == "Return the square root of x."
    assert answer.strip() == "Join two or more pathname components, inserting '/' as needed."


def test_the_two_commands_are_what_make_knows() -> None:
    (code,) = [code for code in _snippets("sh") if "make" in code]
    commands = [line.split("#")[0].strip() for line in code.splitlines()]
    assert commands == ["make serve", "make test"]
    planned = subprocess.run(["make", "test", "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "-m pytest" in planned.stdout


@pytest.mark.slow
def test_make_serve_serves_the_example_models() -> None:
    # In the environment that runs this test, so that nothing is installed twice.
    making = ServerProcess([f"VENV={sys.prefix}", f"ARGS={' '.join(ANY_PORTS)}"], command=["make", "-C", ROOT, "serve"])
    try:
        making.wait_until_started()
        (serving,) = [child for child in making.children() if "serve" in child.cmdline()]
        serving.send_signal(signal.SIGTERM)
        assert making.wait() == 0, making.output
    finally:
        making.close()
    assert re.search(r"digits_onnx\s+1\s+onnxruntime\s+READY", making.output), making.output
