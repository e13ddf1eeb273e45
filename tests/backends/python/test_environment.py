"""Environments that models bring or that are built for them; nothing is downloaded."""

from __future__ import annotations

import sys
import tarfile
import threading
import venv
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from modelserver_backends.python import BACKEND
from support.clients import HttpClient
from support.contexts import context_of, instance_of, request_of
from support.hosted import DoublingBackend
from support.python_models import write_model
from support.serving import running_server

from modelserver.backend import BackendContext, InternalError, InvalidArgumentError, NotFoundError
from modelserver.core.response import InferResponse
from modelserver.execution.process import environment
from modelserver.execution.process.environment import PythonEnvironment

IO = """
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
TELLER = """
    import sys
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            import greeting
            text = f"{greeting.TEXT} {sys.prefix}"
            return [pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", np.array([text], object))]) for _ in requests]
"""


def environment_of(context: BackendContext) -> PythonEnvironment:
    return environment.environment_of(BACKEND, context)


def _wheel(directory: Path, text: str = "hello") -> Path:
    """A package `greeting`, as small as they come."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "greeting-1.0-py3-none-any.whl"
    info = "greeting-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("greeting.py", f"TEXT = {text!r}\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return directory


def _environment(directory: Path, text: str) -> Path:
    """A virtual environment that holds the package `greeting`."""
    venv.create(directory, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (directory / "lib" / version / "site-packages" / "greeting.py").write_text(f"TEXT = {text!r}\n")
    return directory


def _context(tmp_path: Path, config: str = IO, files: dict[str, str] | None = None, **options: str) -> BackendContext:
    directory = write_model(tmp_path, TELLER, config, files)
    return context_of(directory, options={"environment-directory": str(tmp_path / "cache"), **options})


def _parameter(value: str) -> str:
    return f'{IO} parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{value}" }} }}'


def _told(context: BackendContext) -> str:
    instance = instance_of("python", context)
    try:
        (entry,) = instance.execute([request_of(X=np.zeros(1, np.float32))])
    finally:
        instance.close()
    assert isinstance(entry, InferResponse), entry
    text: Any = entry.outputs[0].data[0]
    return str(text.decode())


def test_a_model_without_wishes_runs_as_the_server_does(tmp_path: Path) -> None:
    environment = environment_of(_context(tmp_path))
    assert (environment.interpreter, environment.variables) == ("", {})
    assert not (tmp_path / "cache").exists()


def test_an_environment_that_lies_in_the_models_directory(tmp_path: Path) -> None:
    context = _context(tmp_path, _parameter("$$TRITON_MODEL_DIRECTORY/env"))
    where = _environment(context.model_directory / "env", "from env")
    assert _told(context) == f"from env {where}"


def test_an_archive_is_unpacked_once_and_again_when_it_changes(tmp_path: Path) -> None:
    archive = tmp_path / "env.tar.gz"
    context = _context(tmp_path, _parameter(str(archive)))

    def pack(text: str) -> None:
        where = _environment(tmp_path / text, text)
        with tarfile.open(archive, "w:gz") as content:
            content.add(where, ".")

    pack("one")
    assert _told(context).startswith("one ")
    (first,) = (tmp_path / "cache").glob("unpacked-*/")
    assert environment_of(context).interpreter == f"{first}/bin/python"
    pack("another")
    assert _told(context).startswith("another ")


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("/nowhere/env.tar.gz", NotFoundError, "parameter EXECUTION_ENV_PATH: there is no /nowhere/env.tar.gz"),
        ("$$TRITON_MODEL_DIRECTORY/1", InvalidArgumentError, "there is no .*/1/bin/python"),
        ("$$TRITON_MODEL_DIRECTORY/1/model.py", InvalidArgumentError, r"model\.py cannot be unpacked"),
    ],
)
def test_a_path_that_leads_nowhere_is_named(tmp_path: Path, path: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        environment_of(_context(tmp_path, _parameter(path)))
    assert not list((tmp_path / "cache").glob("unpacked-*/"))


def test_requirements_are_installed_once_for_each_content(tmp_path: Path) -> None:
    wheels = _wheel(tmp_path / "wheels")
    arguments = f"--no-index --find-links {wheels}"
    context = _context(tmp_path, files={"requirements.txt": "greeting==1.0\n"}, **{"pip-arguments": arguments})
    assert _told(context).startswith(f"hello {tmp_path}/cache/built-")
    first = environment_of(context)
    _wheel(wheels, "changed, but nobody looks")
    assert environment_of(context) == first
    assert _told(context).startswith("hello ")
    (context.model_directory / "requirements.txt").write_text("# as before\ngreeting==1.0\n")
    assert _told(context).startswith("changed")


def test_several_that_want_the_same_build_it_once(tmp_path: Path) -> None:
    arguments = f"--no-index --find-links {_wheel(tmp_path / 'wheels')}"
    context = _context(tmp_path, files={"1/requirements.txt": "greeting\n"}, **{"pip-arguments": arguments})
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(environment_of(context).interpreter)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1


def test_what_cannot_be_installed_says_what_pip_said(tmp_path: Path) -> None:
    context = _context(tmp_path, files={"requirements.txt": "no-such-thing\n"}, **{"pip-arguments": "--no-index"})
    with pytest.raises(
        InternalError, match=r"(?s)m/requirements\.txt cannot be installed: .*exited with code 1:.*no-such-thing"
    ):
        environment_of(context)
    assert not list((tmp_path / "cache").glob("built-*/"))
    ignoring = 'parameters { key: "REQUIREMENTS" value { string_value: "ignore" } }'
    (context.model_directory / "config.pbtxt").write_text(f'backend: "python"\n{IO}{ignoring}')
    assert environment_of(replace(context_of(context.model_directory), options=context.options)).interpreter == ""


BACKEND_OF_OTHERS = """
import numpy as np
from modelserver.backend import Backend, TensorInstance

class Speaker(TensorInstance):
    def run(self, inputs):
        import greeting
        return {"TEXT": np.full(inputs["X"].shape, greeting.TEXT.encode(), object)}

class Speech(Backend):
    def load(self):
        import greeting

    def create_instance(self, placement):
        return Speaker()

BACKEND = Speech
"""


def test_any_backend_finds_what_its_model_requires(tmp_path: Path) -> None:
    """The library is in the model's environment alone; a model without one says what to do."""
    (tmp_path / "backends").mkdir()
    (tmp_path / "backends" / "speech.py").write_text(BACKEND_OF_OTHERS)
    for name in ("with", "without"):
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        (tmp_path / "models" / name / "config.pbtxt").write_text(f'backend: "speech"\n{IO}')
    (tmp_path / "models" / "with" / "requirements.txt").write_text("greeting\n")
    settings = {
        "environment-directory": str(tmp_path / "cache"),
        "pip-arguments": f"--no-index --find-links {_wheel(tmp_path / 'wheels')}",
    }
    with (
        running_server(
            tmp_path / "models",
            backend_directory=(str(tmp_path / "backends"),),
            backend_config=tuple(f"{key}={value}" for key, value in settings.items()),
        ) as running,
        HttpClient(running) as client,
    ):
        assert client.infer("with", {"X": np.zeros(1, np.float32)})["TEXT"].tolist() == [b"hello"]
        (reason,) = (row["reason"] for row in client.index() if row["name"] == "without")
    assert "No module named 'greeting'" in reason


def test_what_a_model_brings_along_is_not_installed_where_it_is_no_code(tmp_path: Path) -> None:
    """Published checkpoints often have a requirements.txt; one that a client sends is refused."""
    write_model(tmp_path, TELLER, IO, {"1/requirements.txt": "no-such-thing\n"})
    context = context_of(tmp_path / "m", options={"environment-directory": str(tmp_path / "cache")})
    assert not environment.has_environment(DoublingBackend, context)
    (context.model_directory / "requirements.txt").write_text("no-such-thing\n")
    assert environment.has_environment(DoublingBackend, context)
    with pytest.raises(InvalidArgumentError, match=r"leave out requirements\.txt"):
        environment.has_environment(DoublingBackend, replace(context, is_uploaded=True))
