"""Backends by name, by directory, by entry point, and by the files of a model."""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path

import pytest

from modelserver.backend import discovery
from modelserver.backend.discovery import find_backend, list_backends
from modelserver.backend.model_files import backend_for_model_files, foreign_model_file, model_filenames
from modelserver.errors import InternalError, InvalidArgumentError, NotFoundError, UnavailableError

SOURCE = """
from modelserver.backend import Backend

class {name}(Backend):
    def create_instance(self, placement):
        raise NotImplementedError

BACKEND = {name}
"""


@pytest.fixture(autouse=True)
def forget_external_modules():
    yield
    for name in [name for name in sys.modules if name.startswith(("modelserver_external_", "tiny_"))]:
        del sys.modules[name]


def write_backend(directory: Path, name: str, class_name: str = "Mine", *, package: bool = True) -> Path:
    path = directory / name / "__init__.py" if package else directory / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SOURCE.format(name=class_name))
    return directory


def write_distribution(site: Path, name: str, target: str) -> None:
    """What installing a wheel leaves behind: entry points in a dist-info directory."""
    info = site / "tiny_backend-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[modelserver.backends]\n{name} = {target}\n")


@pytest.mark.parametrize("name", ["identity", "onnxruntime", "pytorch", "sklearn", "xgboost", "lightgbm", "catboost"])
def test_the_table_of_bundled_backends_is_true(name: str) -> None:
    backend = find_backend(name)
    bundled = discovery.BUNDLED[name]
    assert backend.model_filenames == bundled.filenames
    assert backend.extra == bundled.extra
    assert find_backend(name) is backend


def test_every_bundled_directory_is_in_the_table() -> None:
    root = Path(__file__).parents[2] / "backends"
    modules = [backend.module or f"modelserver_backends.{name}" for name, backend in discovery.BUNDLED.items()]
    packages = {name.split(".")[1] for name in modules if name.startswith("modelserver_backends.")}
    assert {path.parent.name for path in root.glob("*/__init__.py")} == packages


def test_tritons_vllm_is_another_name_unless_one_is_installed(tmp_path: Path) -> None:
    assert find_backend("vllm") is find_backend("llm")
    assert "vllm" in [listing.name for listing in list_backends()]
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "model.py").write_text("class TritonPythonModel: pass")
    assert find_backend("vllm", backend_directories=[tmp_path]) is not find_backend("llm")


@pytest.mark.parametrize("package", [True, False])
def test_a_backend_directory_comes_before_the_bundled_ones(tmp_path: Path, package: bool) -> None:
    write_backend(tmp_path, "identity", package=package)
    found = find_backend("identity", backend_directories=[tmp_path])
    assert found.__name__ == "Mine"
    assert find_backend("identity", backend_directories=[tmp_path]) is found
    assert find_backend("identity").__name__ == "IdentityBackend"


def test_the_models_own_directory_comes_first_but_only_when_given(tmp_path: Path) -> None:
    model, shared = tmp_path / "model", tmp_path / "shared"
    write_backend(model, "special", "OfModel")
    write_backend(shared, "special", "Shared")
    assert find_backend("special", backend_directories=[shared], model_directory=model).__name__ == "OfModel"
    assert find_backend("special", backend_directories=[shared]).__name__ == "Shared"


def test_a_package_may_have_several_files(tmp_path: Path) -> None:
    write_backend(tmp_path, "split")
    (tmp_path / "split" / "parts.py").write_text((tmp_path / "split" / "__init__.py").read_text())
    (tmp_path / "split" / "__init__.py").write_text("from .parts import BACKEND")
    assert find_backend("split", backend_directories=[tmp_path]).__name__ == "Mine"


@pytest.mark.parametrize("target", ["tiny_module", "tiny_module:BACKEND", "tiny_module:Mine"])
def test_an_entry_point_names_a_module_or_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    (tmp_path / "tiny_module.py").write_text(SOURCE.format(name="Mine"))
    write_distribution(tmp_path, "tiny", target)
    monkeypatch.syspath_prepend(tmp_path)
    assert find_backend("tiny").__name__ == "Mine"
    assert [listing.source for listing in list_backends() if listing.name == "tiny"] == ["entry point of tiny-backend"]


@pytest.mark.parametrize(("name", "meant"), [("onnx", "onnxruntime"), ("torch", "pytorch"), ("identiy", "identity")])
def test_an_unknown_name_gets_a_suggestion(name: str, meant: str) -> None:
    with pytest.raises(
        NotFoundError,
        match=rf"unknown backend '{name}'; did you mean '{meant}'\? Available: catboost, diffusers, fil, function,",
    ):
        find_backend(name)


def test_an_unknown_name_tells_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        find_backend("nothing_of_ours", backend_directories=[tmp_path / "a"], model_directory=tmp_path / "m")
    for place in (str(tmp_path / "m"), str(tmp_path / "a"), "bundled", "modelserver.backends"):
        assert place in caught.value.message


@pytest.mark.parametrize("name", ["", "../evil", "a/b", ".hidden", "a b"])
def test_a_name_is_no_path(tmp_path: Path, name: str) -> None:
    write_backend(tmp_path, "evil")
    with pytest.raises(InvalidArgumentError, match="must consist of letters"):
        find_backend(name, backend_directories=[tmp_path / "sub"])


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("modelserver_backends.onnxruntime")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(
        UnavailableError, match=r"'onnxruntime', which is not installed: pip install 'modelserver-py\[onnx\]'"
    ):
        find_backend("onnxruntime")


def test_a_missing_library_shows_in_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    listed = {listing.name: listing for listing in list_backends()}
    assert (listed["pytorch"].missing_library, listed["pytorch"].extra) == ("torch", "pytorch")
    assert (listed["onnxruntime"].missing_library, listed["onnxruntime"].extra) == (None, None)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("from math import no_such_thing", "ImportError: cannot import name 'no_such_thing' from 'math'"),
        ("def broken(:", "SyntaxError: invalid syntax"),
        ("x = 1", "expected a module-level name BACKEND .* found nothing of that name"),
        ("BACKEND = 'x'", "found 'x'"),
        ("BACKEND = int", "found <class 'int'>"),
    ],
)
def test_a_broken_backend_keeps_its_own_words(tmp_path: Path, source: str, message: str) -> None:
    write_backend(tmp_path, "broken")
    (tmp_path / "broken" / "__init__.py").write_text(source)
    with pytest.raises(InternalError, match=message) as caught:
        find_backend("broken", backend_directories=[tmp_path])
    assert str(tmp_path) in caught.value.message


def test_a_broken_backend_can_be_mended_without_a_restart(tmp_path: Path) -> None:
    write_backend(tmp_path, "mended")
    source = tmp_path / "mended" / "__init__.py"
    good = source.read_text()
    source.write_text("import no_such_library")
    with pytest.raises(InternalError):
        find_backend("mended", backend_directories=[tmp_path])
    source.write_text(good + "# now it works\n")
    assert find_backend("mended", backend_directories=[tmp_path]).__name__ == "Mine"


def test_a_broken_entry_point_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "tiny", "tiny_missing:BACKEND")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InternalError, match="entry point tiny_missing:BACKEND cannot be imported: ModuleNotFoundError"):
        find_backend("tiny")


def test_loads_at_once_execute_a_backend_once(tmp_path: Path) -> None:
    write_backend(tmp_path, "slow")
    source = tmp_path / "slow" / "__init__.py"
    source.write_text("import time\ntime.sleep(0.05)\n" + source.read_text())
    found: list[type] = []
    threads = [
        threading.Thread(target=lambda: found.append(find_backend("slow", backend_directories=[tmp_path])))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    ("filename", "backend"),
    [
        ("model.onnx", "onnxruntime"),
        ("model.pt", "pytorch"),
        ("model.pt2", "pytorch"),
        ("model.py", "python"),
        ("model.bin", None),
    ],
)
def test_model_files_tell_their_backend(tmp_path: Path, filename: str, backend: str | None) -> None:
    (tmp_path / filename).touch()
    assert backend_for_model_files(tmp_path) == backend


def test_a_pytorch_model_with_its_python_file_is_a_python_model(tmp_path: Path) -> None:
    for filename in ("model.pt", "model.py"):
        (tmp_path / filename).touch()
    assert backend_for_model_files(tmp_path) == "python"


def test_only_backends_with_files_are_recognised_by_them() -> None:
    assert set(model_filenames()) == {
        *(
            "tensorrt",
            "onnxruntime",
            "python",
            "pytorch",
            "catboost",
            "mlflow",
            "llm",
            "sklearn",
            "xgboost",
            "lightgbm",
            "transformers",
            "diffusers",
            "openvino",
        )
    }


def test_the_list_shows_what_would_be_taken(tmp_path: Path) -> None:
    write_backend(tmp_path, "identity")
    write_backend(tmp_path, "another", package=False)
    listed = {listing.name: listing.source for listing in list_backends([tmp_path])}
    assert listed["identity"] == listed["another"] == str(tmp_path)
    assert listed["python"] == "bundled"


@pytest.mark.parametrize(
    ("document", "backend"),
    [
        ('{"model": "/models/qwen3", "max_model_len": 100}', "llm"),
        ('{"model": "qwen3", "rope_scaling": {}}', "llm"),
        ("{}", "llm"),
        ("not JSON", "llm"),
        ('{"learner": {"attributes": {}}, "version": [2, 1, 0]}', "xgboost"),
        ('{"oblivious_trees": [], "features_info": {}}', "catboost"),
        ('{"name": "tree", "tree_info": []}', None),  # LightGBM
        ('{"trees": [], "names": "' + "x" * (1 << 20) + '"}', None),
    ],
    ids=range(8),
)
def test_a_model_json_of_another_library_is_no_language_model(
    tmp_path: Path, document: str, backend: str | None
) -> None:
    (tmp_path / "model.json").write_text(document)
    assert backend_for_model_files(tmp_path) == backend
    if backend is None:
        hint = foreign_model_file(tmp_path)
        assert hint is not None
        assert "convert it to ONNX, or serve it by a Python model" in hint
    else:
        (tmp_path / "config.json").write_text("{}")
        assert backend_for_model_files(tmp_path) == backend
