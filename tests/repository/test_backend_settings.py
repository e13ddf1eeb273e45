from pathlib import Path

import pytest
from support.repositories import write_model

from modelserver.backend import Backend
from modelserver.backend.discovery import find_backend
from modelserver.repository.definition import read_definition
from modelserver.repository.layout import scan_model
from modelserver.repository.options import DefinitionOptions
from modelserver.repository.unsupported import setting_warnings, unknown_backends


def warnings_of(backend: str, settings: dict[str, dict[str, str]]) -> list[str]:
    options = DefinitionOptions(backend_config=settings)
    return [str(warning) for warning in setting_warnings(options, backend, find_backend(backend))]


@pytest.mark.parametrize("name", ["identity", "onnxruntime", "python", "pytorch"])
def test_a_setting_that_a_backend_does_not_know_is_named(name: str) -> None:
    (warning,) = warnings_of(name, {name: {"default-max-batch-sise": "8"}, "other": {"x": "1"}})
    assert warning.startswith(f"--backend-config={name},default-max-batch-sise: has no effect: backend '{name}'")
    assert warning.endswith("; did you mean default-max-batch-size?")
    assert warnings_of(name, {"": {"turbo": "1"}}) == [
        f"--backend-config=turbo: has no effect: backend '{name}' knows no setting 'turbo'"
    ]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("onnxruntime", "intra_op_thread_count"),
        ("onnxruntime", "min-compute-capability"),
        ("python", "stub-timeout-seconds"),
        ("python", "shm-default-byte-size"),
        ("python", "shm-region-prefix-name"),
        ("pytorch", "allow-pickle"),
        ("pytorch", "default-max-batch-size"),
        ("identity", "auto-complete-config"),
        ("identity", "backend-directory"),
    ],
)
def test_settings_that_are_known_or_tritons_for_all_are_taken_quietly(name: str, key: str) -> None:
    assert warnings_of(name, {name: {key: "1"}}) == []


def test_a_backend_that_does_not_declare_its_settings_is_not_judged() -> None:
    class Silent(Backend):
        pass

    assert setting_warnings(DefinitionOptions(backend_config={"silent": {"x": "1"}}), "silent", Silent) == ()


def test_the_warning_comes_with_the_definition(tmp_path: Path) -> None:
    layout = scan_model(write_model(tmp_path, "m"), "m")
    options = DefinitionOptions(backend_config={"identity": {"x": "1"}})
    (warning,) = read_definition(layout, options).warnings
    assert warning.source == "--backend-config=identity,x"


def test_a_backend_that_is_nowhere_is_named_with_the_nearest() -> None:
    options = DefinitionOptions(backend_config={"onnxruntme": {"x": "1"}, "python": {}, "": {"x": "1"}})
    assert unknown_backends(options) == (
        "--backend-config=onnxruntme,...: there is no backend 'onnxruntme'; did you mean onnxruntime?",
    )
    bringing = DefinitionOptions(backend_config={"mine": {"x": "1"}}, allow_model_backends=True)
    assert unknown_backends(bringing) == ()
