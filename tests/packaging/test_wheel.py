"""What `make wheel` makes: an sdist, and of it a wheel that installs into an empty environment and serves there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from support.processes import ANY_PORTS, ENVIRONMENT, ServerProcess

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTENSIONS = {
    "modelserver/core/_accelerator.abi3.so",
    "modelserver/wire/sockets/_calls.abi3.so",
    "modelserver_backends/llm/_kernels.abi3.so",
    "modelserver_backends/llm/_packed_linear.abi3.so",
}
# Where each top package lies in the repository.
SOURCES = {"modelserver": ROOT / "modelserver", "modelserver_backends": ROOT / "backends"}
CONFIG = """
name: "double"
backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
"""
MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", 2 * each)]) for each in inputs]
"""


def _run(command: Sequence[str | Path], cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of a copy of the tree: setuptools leaves files beside the sources."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("modelserver", "backends"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    _run([sys.executable, "-c", "from setuptools import build_meta; build_meta.build_sdist('dist')"], tree)
    (made,) = (tree / "dist").iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """The wheel that is built of the sdist alone."""
    place = sdist.parent.parent / "unpacked"
    with tarfile.open(sdist) as archive:
        archive.extractall(place, filter="data")
    (source,) = place.iterdir()
    flags = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--disable-pip-version-check")
    _run([sys.executable, "-m", "pip", "wheel", *flags, f"--wheel-dir={place}", source])
    (made,) = place.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel. Its dependencies are those of this one, without our own package."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=False)
    borrowed = place / "borrowed"
    borrowed.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "modelserver" not in entry.name and entry.suffix != ".pth":
            (borrowed / entry.name).symlink_to(entry)
    (own,) = (place / "lib").glob("python*/site-packages")
    (own / "borrowed.pth").write_text(f"{borrowed}\n")
    pip = [sys.executable, "-m", "pip", f"--python={place / 'bin' / 'python'}", "--disable-pip-version-check"]
    # Without an index: what the wheel needs has to be there already.
    _run([*pip, "install", "--no-index", "--no-compile", "--quiet", wheel])
    return place


def _expected() -> set[str]:
    """The files of our packages, as the wheel names them."""
    patterns = ("*.py", "*.pyi", "*.yaml", "py.typed", "static/*", "routes.toml")
    return {
        f"{top}/{path.relative_to(source)}"
        for top, source in SOURCES.items()
        for pattern in patterns
        for path in source.rglob(pattern)
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names - EXTENSIONS == _expected()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_is_of_the_stable_abi_with_the_parts_in_c(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert set(names) >= (EXTENSIONS if shutil.which("cc") else set())
    version = PYPROJECT["project"]["version"]
    assert wheel.name.startswith(f"modelserver_py-{version}-cp311-abi3-")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_installed_package_is_used_with_its_parts_in_c(environment: Path) -> None:
    code = (
        "import modelserver, importlib.metadata as m, modelserver.core.accelerator as a;"
        "print(modelserver.__file__, m.version('modelserver-py'), a.read_array is not None)"
    )
    path, version, is_fast = _run([environment / "bin" / "python", "-c", code], environment).split()
    assert Path(path).is_relative_to(environment)
    assert version == PYPROJECT["project"]["version"]
    assert is_fast == str(shutil.which("cc") is not None)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_installed_server_serves(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "double" / "1").mkdir(parents=True)
    (tmp_path / "double" / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "double" / "1" / "model.py").write_text(MODEL)
    command = (str(environment / "bin" / "modelserver"), "serve")
    server = ServerProcess([f"--model-repository={tmp_path}", *ANY_PORTS], command=command)
    try:
        server.wait_until_started()
        client = httpclient.InferenceServerClient(server.http_url)
        tensor = httpclient.InferInput("x", [3], "FP32")
        tensor.set_data_from_numpy(np.array([1, 2, 3], np.float32))
        assert client.infer("double", [tensor]).as_numpy("y").tolist() == [2, 4, 6]
        client.close()
        listed = subprocess.run(
            [environment / "bin" / "modelserver", "list"],
            env={**ENVIRONMENT, "MODELSERVER_URL": server.http_url, "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert "double" in listed.stdout
    finally:
        server.close()
