"""Every message that tells a user to install an extra names one that exists and that brings what is missing."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from modelserver_backends.llm.backend import _LIBRARIES as LLM_LIBRARIES

from docs.generate import distributions
from modelserver.backend.discovery import BUNDLED
from modelserver.store.cloud_store import _LIBRARIES as CLOUD_LIBRARIES

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = {extra: set(names) for extra, names in distributions().items()}
# Files whose messages name an extra, and the distributions that each message speaks of.
MESSAGES = {
    "modelserver/store/cloud_store.py": {"cloud": {"fsspec", *CLOUD_LIBRARIES.values()}},
    "modelserver/batch/formats.py": {"batch": {"pyarrow"}},
    "modelserver/execution/shared_resources.py": {"redis": {"redis"}},
    "modelserver/cluster/ray_cluster.py": {"ray": {"ray"}},
    "modelserver/cli/infer.py": {"images": {"pillow"}},
    "modelserver/frontends/openai/images.py": {"images": {"pillow"}},
    "modelserver/frontends/openai/speech.py": {"audio": {"soundfile"}},
    "modelserver/store/hub.py": {"hub": {"huggingface_hub"}},
    "modelserver/telemetry/otel.py": {
        "otel": {"opentelemetry-exporter-otlp-proto-grpc", "opentelemetry-exporter-otlp-proto-http"}
    },
    "backends/onnxruntime/diagnosis.py": {"onnx": {"onnxruntime"}},
    "backends/llm/grammar/compile.py": {"llm": {"llguidance"}},
    "backends/llm/kv_events.py": {"kv-events": {"msgpack", "pyzmq"}},
    "backends/tensorrt/runtime.py": {
        "tensorrt": {"tensorrt", "torch"},
        "tensorrt-rtx": {"tensorrt_rtx_cu13", "torch"},
    },
    "backends/tensorrt/findings.py": {"tensorrt": {"torch"}},
    "backends/tensorrt/device.py": {"tensorrt": {"torch"}},
}
# Of libraries that are called otherwise there.
DISTRIBUTIONS = {"sklearn": "scikit-learn", "xgboost": "xgboost-cpu"}
SOURCES = [path for top in ("modelserver", "backends") for path in sorted((ROOT / top).rglob("*.py"))]


def _named(path: Path) -> set[str]:
    """The extras that the strings of a file name as they stand."""
    text = path.read_text()
    if "modelserver-py[" not in text:
        return set()
    strings = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    return {
        name for text in strings if isinstance(text, str) for name in re.findall(r"modelserver-py\[([\w,-]+)\]", text)
    }


def _required() -> Iterator[tuple[str, str, str]]:
    """File, distribution and extra of each call of the toolkit's `require`."""
    for path in SOURCES:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "require(" in text else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require":
                (module,) = [ast.literal_eval(argument) for argument in node.args]
                (extra,) = [ast.literal_eval(each.value) for each in node.keywords if each.arg == "extra"]
                yield str(path.relative_to(ROOT)), module.partition(".")[0], extra


def test_all_messages_are_known() -> None:
    found = {str(path.relative_to(ROOT)): names for path in SOURCES if (names := _named(path))}
    assert found == {file: set(extras) for file, extras in MESSAGES.items()}


@pytest.mark.parametrize("file", MESSAGES)
def test_an_extra_that_a_message_names_brings_what_it_speaks_of(file: str) -> None:
    for extra, needed in MESSAGES[file].items():
        assert needed <= EXTRAS[extra]


def test_an_extra_that_the_toolkit_names_brings_what_it_needs() -> None:
    calls = list(_required())
    assert ("onnx", "convert") in {call[1:] for call in calls}
    assert not [call for call in calls if call[1] not in EXTRAS[call[2]]]


@pytest.mark.parametrize("name", [name for name, backend in BUNDLED.items() if backend.extra])
def test_the_extra_of_a_backend_brings_its_library(name: str) -> None:
    backend = BUNDLED[name]
    assert DISTRIBUTIONS.get(str(backend.library), backend.library) in EXTRAS[backend.extra or ""]


def test_the_extra_of_language_models_brings_all_of_their_libraries() -> None:
    assert set(LLM_LIBRARIES) <= EXTRAS["llm"]


def test_whatever_the_tests_import_is_installed_by_make_test() -> None:
    """A library that lies here by chance would be missing on a new machine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = [*project["dependencies"], "torch", "text-generation", "modelserver-py"]
    for extra in ("onnx", "pytorch", "images", "llm", "dev"):
        installed += project["optional-dependencies"][extra]
    brought: set[str] = set()
    while installed:
        name = _normalized(installed.pop())
        if name not in brought:
            brought.add(name)
            try:
                installed += [need for need in requires(name) or () if "extra ==" not in need or name == "moto"]
            except PackageNotFoundError:
                continue
    distributions = packages_distributions()
    lacking = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for module in _imported(path)
        if module in distributions and not {_normalized(each) for each in distributions[module]} & brought
    }
    assert not lacking


def _normalized(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=~!; (]", requirement)[0]).lower()


def _imported(path: Path) -> set[str]:
    """The top packages that a file imports as it is loaded."""
    return set(re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.MULTILINE))
